"""Words of the command line, and names of backends, that the measuring programs refuse."""

from functools import partial
from importlib import import_module

import pytest

from favor.eval.approximation.variants import variants_of
from favor.eval.common.launch import Backend
from favor.eval.glue import __main__ as glue
from favor.eval.language.program import Variant
from favor_command.programs import EVAL, ROOT

REFUSED = [
    ("approximation --text a.txt --seconds 3", "--seconds is not for text"),
    ("approximation --audio_dir a --lengths 3", "--lengths is not for audio"),
    ("approximation --audio_dir a --adapted b", "--adapted is not for audio"),
    ("approximation --audio_dir a --glue_dir b", "--glue_dir is not for audio"),
    ("approximation --audio_dir a --text b", "not allowed with argument"),
    ("approximation --audio_dir a --flop_budgets 0.5", "must be given together"),
    ("approximation --audio_dir a --seconds 0", "--seconds must be above 0"),
    ("approximation", "one of the arguments --text --audio_dir is required"),
    ("decomposition --parts none", "invalid choice: 'none'"),
    ("demo --documents 2", "--documents must be at least 4"),
    ("generation --window -1", "--window must not be negative"),
    ("head_optimizer", "needs --images_dir"),
    ("head_optimizer --tasks text", "needs --text"),
    ("kernel_classification --shuffles 0", "must be at least 1"),
    ("lexicon --dictionary d --output_file x --splits train", "--data_dir and --splits need each other"),
    ("long_form --backends flash", "backend must be one of"),
    ("long_form --minutes 0", "must be positive"),
    ("long_form --threads 0", "must be at least 1"),
    ("majorization --datasets iris", "got iris: did you mean digits?"),
    ("needle m --text x --cases 0", "--lengths and --cases must be at least 1"),
    ("report m --text x --lengths 0", "--lengths, --samples and --query_samples must be at least 1"),
    ("report m --text x --samples 0", "must be at least 1"),
    ("report m --text x --max_error 0", "must be above 0"),
    ("report m --text x --seconds_per_cell nan", "must be above 0"),
    ("speed --per_device_eval_batch_size 0", "expected --per_device_eval_batch_size of at least 1, got 0"),
    ("speed --lengths 0", "expected --lengths of at least 1, got 0"),
    ("streaming --backends eager", "invalid choice"),
    ("streaming --pieces_ms 0", "must be at least 1"),
    ("streaming --minutes -1", "must not be negative"),
    ("whisper_ctc m --data_dir d --whisper w", "--whisper rescores the texts of the beam search, so it needs"),
    ("whisper_ctc m --data_dir d --causal_model m", "--causal_model rescores the texts of the beam search, so it"),
    ("whisper_ctc m --data_dir d --ngram_weights 0", "so they need --causal_model"),
    ("whisper_ctc m --data_dir d --context_texts 2", "so it needs --causal_model"),
    ("whisper_ctc m --data_dir d --context_texts -1", "--context_texts must be at least 0, got -1"),
    ("whisper_ctc m --data_dir d --rescored_texts 0", "--rescored_texts, --max_eval_samples must be at least 1"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_words_that_are_refused(words, message, capsys):
    program, *rest = words.split()
    with pytest.raises(SystemExit):
        import_module(ROOT.members().get(program, EVAL.members().get(program)).module).parse_arguments(rest)
    assert message in capsys.readouterr().err


listed = partial(variants_of, num_features=[8], windows=[0])
TEXTS = [
    (Backend.parse, "favor*:sderf", "backend must be one of"),
    (Backend.parse, "sdpa:64", "takes no features"),
    (Backend.parse, "favor+:0", "at least 1"),
    (Backend.parse, "favor#:sderf:saderf", r"NAME\[:FEATURES\]\[:NUMBER\]"),
    (Variant.parse, "sdpa:window=3", "must be one of"),
    (Variant.parse, "favor+:window", "features"),
    (Variant.parse, "favor+:windoww=3", "Did you mean 'window'"),
    (Variant.parse, "landmark:cache=all", "cache must be one of"),
    (Variant.parse, "landmark:num_features=0", "at least 1"),
    (Variant.parse, "landmark:window=64", "has no window"),
    (Variant.parse, "favor+:features=sderf", "features"),
    (listed, ["landmark:page=4"], "unknown option page"),
    (listed, ["landmark:seed=4"], "seed cannot be set for one of the compared backends"),
    (listed, ["landmark:window=4"], "landmark has no window"),
    (listed, ["favor_elu:num_features=4"], "does not read num_features"),
    (listed, ["landmarks"], "a backend must be one of .* got 'landmarks'"),
    (listed, ["favor#:wderf:64"], "must be written NAME"),
    (glue.parse_arguments, ["--seed=3"], "--seed is set by"),
    (glue.parse_task_options, ["learning_rate=1"], "TASK:NAME=VALUE"),
    (glue.parse_task_options, ["wnli:learning_rate=1"], "task must be one of"),
]


@pytest.mark.parametrize(("read", "text", "message"), TEXTS)
def test_texts_that_are_refused(read, text, message):
    with pytest.raises(ValueError, match=message):
        read(text)
