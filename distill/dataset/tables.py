"""Arrow tables: parquet files, and what `datasets` keeps; and arrow's streams for compressed text."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from distill.dataset.rows import COLUMNS, cells_to_sample, check_columns
from distill.errors import InputError
from distill.types import Sample

if TYPE_CHECKING:
    from pyarrow import RecordBatch

_ROWS_AT_A_TIME = 256
_BUFFER = 1 << 20


@contextmanager
def decompressed(path: Path, compression: str) -> Iterator[BinaryIO]:
    """A ``gzip`` or ``zstd`` file's content as a stream. Reading raises OSError if it is damaged or cut off."""
    import pyarrow

    if not path.stat().st_size:
        raise OSError("the file is empty")
    with pyarrow.input_stream(str(path), compression=compression) as stream:
        yield io.BufferedReader(stream, _BUFFER)


def read_parquet(path: Path, name: str) -> Iterator[Sample]:
    """The rows of a parquet file, ``file:row N`` from 1 on, a few at a time; other columns aren't even decoded.

    Raises InputError for what isn't parquet, is damaged, or has no column that is known, and for a bad row.
    """
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, buffer_size=_BUFFER, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            check_columns(names, name)
            columns = [column for column in COLUMNS if column in names]
            batches = file.iter_batches(_ROWS_AT_A_TIME, columns=columns, use_threads=False)
            yield from table_samples(batches, name)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise damaged(name, error) from error


def table_samples(batches: Iterable["RecordBatch"], name: str) -> Iterator[Sample]:
    """The rows of record batches or tables, numbered from 1 on. Raises InputError with ``name:row N``."""
    number = 0
    for batch in batches:
        for index in range(batch.num_rows):
            number += 1
            where = f"{name}:row {number}"
            try:
                row = {
                    key: column[index].as_py() for key, column in zip(batch.schema.names, batch.columns, strict=True)
                }
            except UnicodeDecodeError as error:
                raise InputError(f"{where}: text that is not UTF-8; save it as UTF-8") from error
            yield cells_to_sample(row, where)


def damaged(name: str, error: Exception) -> InputError:
    """What to say of a file that a library can't make sense of."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return InputError(f"{name}: damaged, cut off or not what its name says ({reason}); make or download it again")
