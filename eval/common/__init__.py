"""Parts that all evaluation programs share."""
