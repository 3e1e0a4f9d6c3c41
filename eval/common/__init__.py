"""What all evaluation programs share."""
