"""The Transducer: its loss (`loss`, on `autograd`, `lattice` and `lattice_gpu`), and its searches (`decoding`)."""
