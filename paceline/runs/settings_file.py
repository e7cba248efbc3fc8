"""Reads settings files, YAML or JSON; rejects duplicate keys, which YAML's own loader silently accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, needing, reraised


def read_settings_file(file: Path, remedy: str) -> dict[str, Any]:
    """Returns the top-level mapping of a YAML or JSON settings file.

    `remedy`: advice for error messages. Raises ConfigError when the file cannot be read, is not a mapping, or has a
    duplicate key (the message gives its line).
    """
    with needing(ConfigError, f"reading {file} needs PyYAML: pip install 'paceline[serve]'"):
        import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = dict[str, int]()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                name, line = str(key.value), key.start_mark.line + 1
                if name in seen and name != "<<":
                    raise ConfigError(
                        f"{file}, line {line}: {name} stands twice, first in line {seen[name]}: remove one"
                    )
                seen[name] = line
            return super().construct_mapping(node, deep)

    with reraised(ConfigError, f"{file} cannot be read", remedy, OSError, ValueError, RecursionError, yaml.YAMLError):
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds no settings by name: {remedy}")
    return tree
