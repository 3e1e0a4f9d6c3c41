"""Words of the command line that the measuring programs refuse."""

from importlib import import_module

import pytest

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
    ("decomposition --draws 1", "--draws must be at least 2"),
    ("decomposition --sweeps 0", "--sweeps, --starts, --iterations, --max_passes and --num_seeds must be at least 1"),
    ("decomposition --rows 10", "--rows must be at least 50"),
    ("decomposition --gaps 0.5", "--gaps above 0 and below .4"),
    ("decomposition --parts none", "invalid choice: 'none'"),
    ("demo --documents 2", "--documents must be at least 4"),
    ("generation --window -1", "--window must not be negative"),
    ("head_optimizer", "needs --images_dir"),
    ("head_optimizer --tasks text", "needs --text"),
    ("head_optimizer --tasks sst2 --glue_dir d --num_seeds 0", "at least 1"),
    ("kernel_classification --num_features 15", "must be even"),
    ("kernel_classification --feature_seeds 0", "must be at least 1"),
    ("kernel_classification --scales -1", "--scales positive"),
    ("kernel_classification --methods relu", "invalid choice: 'relu'"),
    ("lexicon --dictionary d --output_file x --splits train", "--data_dir and --splits need each other"),
    ("long_form --backends flash", "backend must be one of"),
    ("long_form --minutes 0", "must be positive"),
    ("long_form --threads 0", "must be at least 1"),
    ("majorization --num_seeds 0", "--num_seeds, --num_train_epochs and --time_limit must be positive"),
    ("majorization --time_limit 0", "must be positive"),
    ("majorization --datasets iris", "got iris: did you mean digits?"),
    ("majorization --num_train_epochs inf", "must be finite"),
    *(
        (f"needle m --text x --output_dir y --cases {own}", "N or FIRST:END")
        for own in ("0", "3:3", "a", ":4", "1:2:3")
    ),
    ("report m --text x --lengths 0", "--lengths, --samples and --query_samples must be at least 1"),
    ("report m --text x --samples 0", "must be at least 1"),
    ("report m --text x --max_error 0", "must be above 0"),
    ("report m --text x --seconds_per_cell nan", "must be above 0"),
    ("speed --per_device_eval_batch_size 0", "expected --per_device_eval_batch_size of at least 1, got 0"),
    ("speed --lengths 0", "expected --lengths of at least 1, got 0"),
    ("streaming --backends eager", "invalid choice"),
    ("streaming --pieces_ms 0", "must be at least 1"),
    ("streaming --minutes -1", "must not be negative"),
    ("synthesize --texts a.txt --output_dir out --hours 0", "--hours and --max_duration_in_seconds must be positive"),
    ("synthesize --texts a.txt --output_dir out --hours 1 --tempo 1", "--tempo and --pitch must be at least 0"),
    ("synthesize --texts a.txt --output_dir out --hours 1 --without dev", "are given together or not at all"),
    ("variance --sets 0", "--sets must be at least 1"),
    ("variance --vectors 1", "--vectors at least 2"),
    ("variance --sigmas 0", "--sigmas positive"),
    ("variance --regimes cosmic", "invalid choice: 'cosmic'"),
    ("whisper_ctc m --data_dir d --whisper w", "--whisper rescores the texts of the beam search, so it needs"),
    (
        "whisper_ctc m --data_dir d --causal_model m",
        "--causal_model rescores the texts of the beam search, so it needs",
    ),
    ("whisper_ctc m --data_dir d --ngram_weights 0", "so they need --causal_model"),
    ("whisper_ctc m --data_dir d --context_texts 2", "so it needs --causal_model"),
    ("whisper_ctc m --data_dir d --context_texts -1", "--context_texts must be at least 0, got -1"),
    ("whisper_ctc m --data_dir d --rescored_texts 0", "--rescored_texts and --max_eval_samples must be at least 1"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_words_that_are_refused(words, message, capsys):
    program, *rest = words.split()
    with pytest.raises(SystemExit):
        import_module(ROOT.members().get(program, EVAL.members().get(program)).module).parse_arguments(rest)
    assert message in capsys.readouterr().err
