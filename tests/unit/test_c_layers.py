"""The C sources include each other one way only."""

from __future__ import annotations

from pathlib import Path

from scripts.c_layers import LAYERS, violations

CSRC = Path(__file__).parents[2] / "csrc"


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)


def test_our_sources_keep_their_layers() -> None:
    assert violations(CSRC, LAYERS) == []


def test_every_layer_has_a_file() -> None:
    assert set(LAYERS) == {path.stem for path in CSRC.glob("*.[ch]")}


def test_a_ring_is_found_in_whatever_order_its_files_are_declared(tmp_path: Path) -> None:
    write(
        tmp_path,
        top_c='#include "top.h"\n#include "middle.h"\n',
        top_h="#include <stdio.h>\n",
        middle_c='#include "middle.h"\n\n#include "bottom.h"\n',
        middle_h="",
        bottom_c='  # include "top.h"\n',
        bottom_h="",
    )
    names = ["top", "middle", "bottom"]
    assert violations(tmp_path, names) == ["bottom.c includes top.h, which does not stand below it"]
    for turn in range(3):
        assert violations(tmp_path, names[turn:] + names[:turn])


def test_a_file_without_a_layer_is_named(tmp_path: Path) -> None:
    write(tmp_path, known_c='#include "new.h"\n', new_h="")
    assert violations(tmp_path, ["known"]) == [
        "new.h is in no layer",
        "known.c includes new.h, which does not stand below it",
    ]
