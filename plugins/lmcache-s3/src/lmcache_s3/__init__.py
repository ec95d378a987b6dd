"""The S3 tier of lmcache-core. This module only names things: boto3 is imported when a tier uses it."""

from __future__ import annotations

from collections.abc import Sequence

from lmcache_core.plugins.components import ComponentSpec, Kind
from lmcache_core.plugins.hookspecs import hookimpl


@hookimpl
def lmcache_components() -> Sequence[ComponentSpec]:
    return [
        ComponentSpec(
            Kind.L2_ADAPTER,
            "s3",
            factory="lmcache_s3.adapter:S3Adapter",
            settings="lmcache_s3.settings:S3Settings",
            summary="one object for each object, in a bucket of any S3-compatible store that several servers may share",
        )
    ]
