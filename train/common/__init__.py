"""What all training programs share."""
