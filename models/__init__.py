"""Model zoo: importing this package registers its models with transformers' Auto classes."""

from favor._parts import check_root

check_root(__name__, __file__)

from favor.models import bert, conformer, whisper_ctc  # noqa: E402, F401  after the check
