"""What the loader writes down: plugins that are in, plugins that are not, and hooks that raised."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_core.plugins.components import ComponentSpec, PluginInfo


@dataclass(frozen=True)
class PluginRecord:
    """A plugin that is in use. `load_s` is what its import took."""

    name: str
    distribution: str
    version: str
    info: PluginInfo = field(default_factory=PluginInfo)
    components: tuple[ComponentSpec, ...] = ()
    load_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Refusal:
    """A plugin that was found and is not in use, and why."""

    name: str
    distribution: str
    version: str
    why: str
    claims: tuple[ComponentSpec, ...] = ()  # what it would have offered, where that is known
    chosen: bool = False  # the allow-list leaves it out: nothing is wrong with it

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}): {self.why}"


@dataclass(frozen=True)
class PluginFault:
    """A hook of a plugin that raised. The other plugins went on."""

    plugin: PluginRecord
    hook: str
    error: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} failed in {self.hook}: {self.error}"
