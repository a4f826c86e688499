"""Every emitter can be found: its module is imported at the start or for its opcodes."""

from __future__ import annotations

import re
from pathlib import Path

from torch_hlo.compiler.codegen import registry

FOLDER = Path(registry.__file__).parent


def test_every_module_with_emitters_is_loaded() -> None:
    imported = {*registry.ALWAYS, *registry.ON_DEMAND.values()}
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        if path.stem != "registry" and re.search(
            r"^@(emits_step|emits_value|host_call)\(", text, re.M
        ):
            assert path.stem in imported, path.stem


def test_what_is_loaded_on_demand_is_named_for_all_its_opcodes() -> None:
    for stem in set(registry.ON_DEMAND.values()):
        text = (FOLDER / f"{stem}.py").read_text()
        assert not re.search(r"^@(emits_value|host_call)\(", text, re.M), (
            stem
        )  # these tables are not asked for opcodes
        for names in re.findall(r"^@emits_step\((.*?)\)", text, re.M):
            for opcode in re.findall(r'"([\w-]+)"', names):
                assert registry.ON_DEMAND.get(opcode) == stem
