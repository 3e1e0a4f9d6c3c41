"""Where favor meets other libraries."""
