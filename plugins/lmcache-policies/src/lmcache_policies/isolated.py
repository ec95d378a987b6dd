"""A policy for each tenant, with byte quotas from the settings."""

from __future__ import annotations

from lmcache_core import Kind
from lmcache_core.policies import EvictionPolicy, Quota, TenantedPolicy
from lmcache_policies.settings import IsolatedSettings


class IsolatedPolicy(TenantedPolicy):
    """`TenantedPolicy` with the tenants that the settings list; their quotas are what they have reserved. Namespaces
    that no tenant lists share one quota."""

    def __init__(self, settings: IsolatedSettings) -> None:
        # Imported here: the loader imports every installed plugin's front module, this one's too.
        from lmcache_core.plugins.loader import load_plugins

        registry = load_plugins()

        def inner() -> EvictionPolicy:
            policy: EvictionPolicy = registry.build(
                Kind.EVICTION_POLICY, settings.inner, settings.inner_settings or None
            )
            return policy

        super().__init__(inner, others_quota=Quota(settings.others_quota_bytes))
        for name, listed in settings.tenants.items():
            self.found(name, listed.namespaces, Quota(listed.quota_bytes))
