"""The Transducer: its loss (`loss`) and its searches (`decoding`)."""
