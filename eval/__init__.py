"""Evaluation programs: tables, figures and the demo."""

from favor._parts import check_root, needs

check_root(__name__, __file__)
needs("eval", "matplotlib", "accelerate", "datasets", "sklearn", "scipy")
