"""Saved models: config, class, weights and tokenizer. An error names the folder or the file, in one line."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from inspect import ismodule
from pathlib import Path
from typing import Any

from favor_command.program import in_one_line

CONFIG = "config.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
# Special tokens that a tokenizer itself adds to texts and batches.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

MOST_UNKNOWN = 1 / 3  # of the tokens of a text; a tokenizer of sentencepiece makes two tokens of an unknown word


def location(model: str) -> str:
    """Gives the path of a folder with ~ replaced by the user's home; a name of the hub is returned unchanged."""
    folder = Path(model).expanduser()
    return str(folder) if folder.exists() else str(model)


def check_model(path: str | None) -> None:
    """Raises ValueError if a path is neither a folder with the config of a model nor a name of the hub; None passes."""
    if path is None:
        return
    from transformers.utils import cached_file

    folder = Path(path).expanduser()
    file: Any = folder / CONFIG
    if folder.exists() and not file.is_file():
        what = f"holds no {CONFIG}" if folder.is_dir() else "is a file"
        raise ValueError(f"expected the folder of a saved model, got {path}, which {what}")
    if not folder.exists():
        problem = "and that is no name of the hub"
        try:
            file = cached_file(path, CONFIG) if HUB_NAME.fullmatch(str(path)) else None
        except OSError as error:
            file, problem = None, f"and the hub gives none of that name ({str(error).splitlines()[0]})"
        if file is None:
            raise ValueError(f"expected a model, got {str(path)!r}: there is no such folder here, {problem}")
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no JSON object")


def read_config(model: str, *, trust_remote_code: bool = False) -> Any:
    """Reads the config of a saved model of transformers or of the zoo, in a folder or of the hub."""
    from transformers import AutoConfig

    import favor.models  # noqa: F401  registers the zoo

    check_model(model)
    try:
        return AutoConfig.from_pretrained(location(model), trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ValueError(f"the {CONFIG} of {model} cannot be used: {_said(error)}") from error


def model_class(config: Any) -> Any:
    """Finds the class of a saved model, with its head; the class without a head if its config names none."""
    import transformers
    from transformers.models.auto import modeling_auto

    import favor.models

    names = getattr(config, "architectures", None) or [None]
    name = names[0] if isinstance(names, list | tuple) else names
    found: Any
    if name is None:
        found = transformers.AutoModel._model_mapping.get(type(config), None)
        found = found[0] if isinstance(found, tuple) else found
    else:
        places = [transformers, *filter(ismodule, vars(favor.models).values())]
        found = next((getattr(place, name) for place in places if hasattr(place, str(name))), None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and found.config_class
    # Some kinds share the models of another kind, as InternLM 3 those of LLaMA, or have some for the config of a part.
    titles = (title for title in vars(modeling_auto) if title.endswith("_MAPPING_NAMES"))
    shared = [getattr(modeling_auto, title).get(config.model_type) for title in titles]
    if not is_model or not (isinstance(config, found.config_class) or found.__name__ in shared):
        what = f"a {name}" if name else f"a {config.model_type}"
        place = config.name_or_path or "the config"
        raise ValueError(f"{place} holds {what}, and there is no class to load it with, of transformers or of favor")
    return found


def load_model(kind: Any, model: str, **options: Any) -> Any:
    """Loads a model as `kind.from_pretrained(model, **options)` does; a ValueError names the file that is damaged."""
    config: Any = options.get("config")
    known: Any = getattr(kind, "_model_mapping", None)
    if None not in (config, known) and type(config) not in known and not options.get("trust_remote_code"):
        # transformers would import all its models, to list them in its message.
        raise ValueError(f"{model} holds a {config.model_type}, which {kind.__name__} does not load")
    try:
        return kind.from_pretrained(location(model), **options)
    except ImportError:
        raise
    except Exception as error:
        damaged = damaged_file(Path(location(model)))
        if damaged is None:
            raise ValueError(f"the model in {model} cannot be loaded: {_said(error)}") from error
        raise ValueError(f"{damaged} is damaged: {_said(error)}; copy or download it again") from error


def damaged_file(folder: Path) -> Path | None:
    """Finds the first file of weights in a folder that is cut off or holds something else; None if there is none."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors*")):
        try:
            if file.suffix == ".json":
                json.loads(file.read_text(encoding="utf-8"))
            else:
                with safe_open(file, "pt"):
                    pass
        except Exception:
            return file
    return None


def load_processor(model: str, kind: Any = None, *, trust_remote_code: bool = False) -> Any:
    """Loads the tokenizer of a saved model, or its processor of a given class; checks the tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

    check_preprocessor(model)
    options = {"trust_remote_code": True} if trust_remote_code else {}
    try:
        found = (kind or AutoTokenizer).from_pretrained(location(model), **options)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"the {getattr(kind, '__name__', 'tokenizer')} of {model} cannot be loaded, a file is missing or damaged: "
            f"{_said(error)}"
        ) from error
    tokenizer = getattr(found, "tokenizer", found)
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        try:
            config = AutoConfig.from_pretrained(location(model), **options)
        except (OSError, ValueError):
            config = None  # the folder of a processor alone
        check_tokenizer(tokenizer, config, model)
    return found


def check_preprocessor(model: str) -> None:
    """Raises a ValueError if a folder has a feature extractor, of any class, whose sizes would fill the memory."""
    from favor.models.speech.audio import MOST

    for path in (Path(model) / "preprocessor_config.json", Path(model) / "processor_config.json"):
        try:
            settings = json.loads(path.read_text())
            parts = [part for part in (settings, settings.get("feature_extractor")) if isinstance(part, dict)]
        except (OSError, ValueError, AttributeError):
            continue  # no folder, or a damaged file, which transformers names
        for part in parts:
            # Seconds, but frames for the class of the zoo, which checks its own.
            most = MOST if "Conformer" in str(part) else MOST | {"chunk_length": 3600}
            for name in most.keys() & part:
                if isinstance(part[name], int | float) and part[name] > most[name]:
                    raise ValueError(f"{path}: {name} must be at most {most[name]}, got {part[name]}")


def check_tokenizer(tokenizer: Any, config: Any, model: str) -> None:
    """Checks that a tokenizer knows words, and that the model, if any, has an embedding for each of its tokens."""
    if not tokenizer.vocab_files_names:
        return  # of bytes or characters: it needs no file
    tokens, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    if len(tokens.keys() - set(tokenizer.all_special_tokens) - {str(token) for token in added.values()}) < 2:
        raise ValueError(
            f"{model} holds no tokenizer: the one that transformers makes of it has special tokens alone; add the "
            "missing file, such as tokenizer.json, or vocab.txt"
        )
    parts = (config, getattr(config, "text_config", None))
    size = next((own for part in parts if (own := getattr(part, "vocab_size", None))), None)
    if size is None:
        return
    # Special tokens that no text contains, such as that of an image, may have no embedding.
    named = {getattr(tokenizer, name) for name in NAMED}
    rare = {str(token) for token in added.values() if token.special} - named
    last, word = max((number, token) for token, number in tokens.items() if token not in rare)
    if last >= size or 2 * len(tokens) < size:
        has = f"the token {word!r} has number {last}" if last >= size else f"it has {len(tokens)} tokens"
        raise ValueError(
            f"the tokenizer of {model} does not fit its model: {has}, and vocab_size is {size}; take the tokenizer of "
            "this model, or call resize_token_embeddings"
        )


def check_known(rows: Iterable[Sequence[int]], tokenizer: Any, source: str) -> None:
    """Raises ValueError if more than a third of the tokens of some texts are unknown; special tokens do not count."""
    unknown, special = tokenizer.unk_token_id, set(tokenizer.all_special_ids)
    if unknown is None or unknown == tokenizer.eos_token_id:
        return  # a tokenizer of bytes, which knows all texts
    counts = Counter(token for row in rows for token in row)
    total = sum(number for token, number in counts.items() if token == unknown or token not in special)
    if counts[unknown] > MOST_UNKNOWN * total:
        raise ValueError(
            f"{counts[unknown] / total:.0%} of the tokens of {source} are {tokenizer.unk_token}: the tokenizer "
            "does not know these texts; take a model of their language, script and case"
        )


def _said(error: Exception) -> str:
    """Gives the message of another library's error in one short line."""
    return textwrap.shorten(in_one_line(error), 300, placeholder=" ...")
