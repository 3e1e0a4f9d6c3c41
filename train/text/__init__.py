"""Parts of the programs that train on text."""
