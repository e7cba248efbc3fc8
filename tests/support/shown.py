"""Keeps what a command shows."""

from __future__ import annotations

from paceline.report.tables import Progress, Table


class Shown(Progress):
    """Keeps the lines and tables that were shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tables: list[Table] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def table(self, table: Table) -> None:
        self.tables.append(table)
