"""The figures and tables of the papers, one program each."""
