"""Evaluation programs: tables, figures and the demo."""
