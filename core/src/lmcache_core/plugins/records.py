"""The loader's records: plugins in use, plugins that were refused, and hooks that raised."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_core.plugins.components import ComponentSpec, PluginInfo


@dataclass(frozen=True)
class PluginRecord:
    """A plugin in use. `load_s`: the time that its import took."""

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
    """A plugin that was found but is not in use, and why."""

    name: str
    distribution: str
    version: str
    why: str
    claims: tuple[ComponentSpec, ...] = ()  # the components that it would have offered, if known
    chosen: bool = False  # the allow-list leaves it out: the plugin is not at fault

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}): {self.why}"


@dataclass(frozen=True)
class PluginFault:
    """A plugin's hook that raised. The other plugins were called anyway."""

    plugin: PluginRecord
    hook: str
    error: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} failed in {self.hook}: {self.error}"
