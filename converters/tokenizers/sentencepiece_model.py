"""SentencePiece's tokenizer.model (Llama 2): its token ids, and the tokenizer.json that gives the same ids."""

from dataclasses import dataclass
from pathlib import Path

from converters.common.errors import UnsupportedError, list_offenders
from converters.common.names import TOKENIZER_JSON
from converters.store.local_files import read_bytes
from converters.tokenizers.tokenizer_json import write_tokenizer_config

BPE_TYPE = 2  # trainer_spec.model_type
_NORMAL, _UNKNOWN, CONTROL, USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # types of a piece
_SPACE = "\u2581"


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """The content of a SentencePiece file. `pieces`: text, score and type by id."""

    pieces: tuple[tuple[str, float, int], ...]
    model_type: int
    control: dict[str, str]  # bos, eos, pad, unk → text, if the model has it
    ids: dict[str, int]  # of the same, -1 for none
    plain: bool  # text is not normalized, except for a space in front; spaces become ▁
    byte_fallback: bool
    charsmap: bytes

    def token_ids(self) -> dict[str, int]:
        """bos_token_id, eos_token_id and pad_token_id, if the model has them."""
        id_of = {text: id for id, (text, _, kind) in enumerate(self.pieces) if kind == CONTROL}
        named = {f"{name}_token_id": id_of.get(self.control[name]) for name in ("bos", "eos", "pad")}
        return {key: id for key, id in named.items() if id is not None}


def read_sentencepiece(path: Path) -> SentencePiece | None:
    """The content of a SentencePiece file; None if the file is of another kind."""
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    model = ModelProto()
    try:
        model.ParseFromString(read_bytes(path))
    except DecodeError:
        return None
    if not model.pieces:
        return None
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    plain = (
        not normalizer.precompiled_charsmap
        and normalizer.add_dummy_prefix
        and normalizer.escape_whitespaces
        and not normalizer.remove_extra_whitespaces
        and not trainer.treat_whitespace_as_suffix
    )
    return SentencePiece(
        tuple((piece.piece, piece.score, piece.type) for piece in model.pieces),
        trainer.model_type,
        {name: getattr(trainer, f"{name}_piece") for name in ("bos", "eos", "pad", "unk")},
        {name: getattr(trainer, f"{name}_id") for name in ("bos", "eos", "pad", "unk")},
        plain,
        trainer.byte_fallback,
        normalizer.precompiled_charsmap,
    )


def write_tokenizer_of_sentencepiece(folder: Path, model: SentencePiece, *, max_seq_len: int) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json for transformers. Returns the names written.

    transformers 5 opens a SentencePiece file alone only if sentencepiece and protobuf are installed, and then gives
    other ids to text that begins with a space. Raises UnsupportedError as require_exact does.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
    from tokenizers.models import BPE

    require_exact(model)
    vocab = {text: id for id, (text, _, _) in enumerate(model.pieces)}
    unk, bos, eos = model.control["unk"], model.control["bos"], model.control["eos"]
    tokenizer = Tokenizer(BPE(vocab, merges_of(model), unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = [text for text, _, kind in model.pieces if kind in (_UNKNOWN, CONTROL)]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    ends = [(bos, vocab[bos])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=ends
    )
    tokenizer.save(str(folder / TOKENIZER_JSON))
    tokens = {"bos_token": bos, "eos_token": eos, "unk_token": unk}
    return [TOKENIZER_JSON, *write_tokenizer_config(folder, tokens, max_seq_len=max_seq_len)]


def require_exact(model: SentencePiece) -> None:
    """Raise UnsupportedError with every reason why no tokenizer.json gives the ids of a SentencePiece model."""
    kinds = {kind for _, _, kind in model.pieces}
    normal = [(text, score) for text, score, kind in model.pieces if kind == _NORMAL]
    texts, scores = {text for text, _ in normal}, [score for _, score in normal]
    problems = []
    if model.model_type != BPE_TYPE:
        problems.append("it is not of type BPE")
    if not model.plain:
        problems.append("it normalizes text, or treats spaces differently from Llama 2's")
    if kinds - {_NORMAL, _UNKNOWN, CONTROL, _BYTE}:
        problems.append("it has user-defined or unused pieces")
    if sum(kind == _BYTE for _, _, kind in model.pieces) != 256:
        problems.append("it does not encode unknown characters as bytes")
    if len(set(scores)) != len(scores):
        problems.append("pieces share a score, so that their order is undefined")
    if lost := {letter for text in texts for letter in text} - texts:
        problems.append(f"{len(lost)} characters occur only inside of pieces")
    if not {model.control["bos"], model.control["eos"]} <= {text for text, _, kind in model.pieces if kind == CONTROL}:
        problems.append("it has no begin or no end of text")
    if problems:
        raise UnsupportedError(
            "no tokenizer.json gives the ids of this SentencePiece model:" + list_offenders(problems)
        )


def merges_of(model: SentencePiece) -> list[tuple[str, str]]:
    """Every pair that makes a piece, in the order of SentencePiece's merging: by the score of the piece."""
    score_of = {text: score for text, score, kind in model.pieces if kind == _NORMAL}
    merges = []
    for text, score in score_of.items():
        pairs = ((text[:i], text[i:]) for i in range(1, len(text)))
        merges += [(-score, left, right) for left, right in pairs if left in score_of and right in score_of]
    return [(left, right) for _, left, right in sorted(merges)]
