"""Models with relative positions: what landmarks and features of far keys cost them, and what they save."""
