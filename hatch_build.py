"""A wheel has the native core where it can be compiled, and is then for this platform, else for any."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeCore(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the core beside its source, takes it along, and takes it away again."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._made: Path | None = None
        if version == "editable":
            return  # `make env` compiles into the checkout, and says what came of it
        build = _build_module(Path(self.root))
        Path(self.directory).mkdir(parents=True, exist_ok=True)
        try:
            command = build.build(Path(self.directory) / build.LIBRARY.name)
        except build.BuildFailed as reason:
            self.app.display_warning(f"without the native core: {reason}. {build.HOW_TO}")
            return
        self._made = Path(self.directory) / build.LIBRARY.name
        self.app.display_info(f"native core: compiled by {command}")
        build_data["force_include"][str(self._made)] = "instep/native/core.so"
        build_data["pure_python"] = False
        # Called by ctypes, it is of no Python version, but of this platform.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            self._made.unlink(missing_ok=True)


def _build_module(root: Path) -> Any:
    """``instep.native.build`` from this tree: what builds a wheel has instep not installed."""
    path = root / "instep" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("instep_native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
