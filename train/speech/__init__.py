"""Parts of the programs that train on speech."""
