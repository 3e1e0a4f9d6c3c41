"""The demo, `python -m favor.eval.demo`: long novels, and a fine-tuned BERT, with exact and linear attention."""
