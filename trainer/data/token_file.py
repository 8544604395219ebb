"""Write the tokens and offsets of a split document by document, for an unknown number of documents."""

from pathlib import Path

import numpy as np

from converters.common.errors import DataError
from converters.tokenizers.tokenizer import Tokenizer
from trainer.data.index import offsets_file, tokens_file

_IDS_AT_ONCE = 1 << 20
_HEADER_BYTES = 128  # of a one-dimensional .npy file of any length


class TokenFile:
    """Counts what it writes. The .npy header, which holds the length, goes in front when the file is closed."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, *, special_tokens: bool = False):
        self._folder, self._split, self._tokenizer, self._special = folder, split, tokenizer, special_tokens
        self._dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self._file = (folder / tokens_file(split)).open("wb")
        self._file.write(bytes(_HEADER_BYTES))
        self._offsets = [0]
        self.histogram = np.zeros(tokenizer.vocab_size, np.int64)  # how often each token occurs
        self.text_bytes = 0

    @property
    def num_tokens(self) -> int:
        return self._offsets[-1]

    @property
    def num_documents(self) -> int:
        return len(self._offsets) - 1

    def add(self, content: str | np.ndarray, where: str = "") -> None:
        """Append a document: a text, framed by its begin and end token, or token ids as they are.

        Raises DataError, naming `where`, for an id that the tokenizer does not have.
        """
        self._offsets.append(self.num_tokens)
        if isinstance(content, str):
            encoded = self._tokenizer.encode(content, bos=True, eos=True, special=self._special)
            self._write(np.array(encoded, self._dtype))
            self.text_bytes += len(content.encode())
            return
        for start in range(0, len(content), _IDS_AT_ONCE):
            ids = content[start : start + _IDS_AT_ONCE]
            if (largest := int(ids.max())) >= self._tokenizer.vocab_size:
                raise DataError(
                    f"{where}: token {start + int(ids.argmax())} is {largest}, but the tokenizer has"
                    f" {self._tokenizer.vocab_size} tokens",
                    hint="ready token ids go with the tokenizer that made them",
                )
            self._write(ids.astype(self._dtype))

    def _write(self, ids: np.ndarray) -> None:
        self._file.write(ids.tobytes())
        self._offsets[-1] += len(ids)
        self.histogram += np.bincount(ids, minlength=len(self.histogram))

    def close(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._dtype)
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file, {"descr": descr, "fortran_order": False, "shape": (self.num_tokens,)}
        )
        assert self._file.tell() == _HEADER_BYTES
        self._file.close()
        np.save(self._folder / offsets_file(self._split), np.array(self._offsets, np.int64), allow_pickle=False)
