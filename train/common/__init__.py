"""Parts that all training programs share."""
