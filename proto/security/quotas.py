"""What one namespace may take of a cluster: the section ``quotas`` of a security file.

::

    quotas:
      default:            # of each namespace
        tables: 1024
      namespaces:         # of these; what is not named here is as in default
        ads: {tables: 4096, memory_share: 0.5}

The quotas hold without a security file too, and follow the file while a server runs.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import ResourceExhausted, not_allowed
from ..names import check_name
from ..options.strict_model import StrictModel

MOST_SHARE = 0.875  # the rest is for namespaces without a share (cpp_ext/store/table/memory_shares.h)


class Quota(StrictModel):
    """The bounds of one namespace."""

    tables: int = Field(1024, ge=1, le=1 << 20, description="Tables.")
    jobs: int = Field(
        64, ge=1, le=1 << 20, description="Jobs that have workers; a gateway that serves the namespace is one."
    )
    registrations_per_sec: float = Field(
        20.0,
        gt=0,
        le=1e6,
        allow_inf_nan=False,
        description="Registrations of workers each second; ten seconds' worth may come at once.",
    )


class NamespaceQuota(Quota):
    """The bounds of a namespace that the file names."""

    memory_share: float | None = Field(
        None,
        gt=0,
        le=MOST_SHARE,
        description="Share of each shard's memory_budget that stays free for the namespace until it has filled it; "
        "null: an equal part of an eighth, with all others that have tables and no share.",
    )


class Quotas(StrictModel):
    """The bounds of all namespaces."""

    default: Quota = Field(Quota(), description="The bounds of each namespace.")
    namespaces: dict[str, NamespaceQuota] = Field({}, description="Other bounds of namespaces, by name.")

    @model_validator(mode="after")
    def _fits(self) -> Quotas:
        for name in self.namespaces:
            check_name("quotas.namespaces", name)
        total = sum(self.memory_shares().values())
        if total > MOST_SHARE + 1e-9:
            raise not_allowed("memory_share of all namespaces together", round(total, 6), f"at most {MOST_SHARE}")
        return self

    def of(self, namespace: str) -> Quota:
        """Returns the bounds of a namespace."""
        own = self.namespaces.get(namespace)
        if own is None:
            return self.default
        return self.default.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})

    def memory_shares(self) -> dict[str, float]:
        """Returns the shares of memory by namespace, of those that have one."""
        return {name: own.memory_share for name, own in self.namespaces.items() if own.memory_share is not None}

    def check_tables(self, namespace: str, count: int) -> None:
        """Refuses so many tables of a namespace when they are more than it may have.

        Raises:
            ResourceExhausted: they are more; the text has the namespace, the bound and where it is set.
        """
        most = self.of(namespace).tables
        if count > most:
            raise beyond_quota(namespace, "tables", f"{count} tables", f"at most {most}", "drop some")

    def check_jobs(self, namespace: str, count: int) -> None:
        """Refuses so many jobs of a namespace with workers when they are more than it may have.

        Raises:
            ResourceExhausted: as for :meth:`check_tables`.
        """
        most = self.of(namespace).jobs
        if count > most:
            raise beyond_quota(namespace, "jobs", f"{count} jobs with workers", f"at most {most}", "end some")


def beyond_quota(namespace: str, field: str, wanted: str, allowed: str, remedy: str) -> ResourceExhausted:
    """Returns the error for what a namespace may not take."""
    return ResourceExhausted(
        f"namespace {namespace!r}: {wanted} are not allowed; allowed: {allowed}; {remedy}, or set "
        f"quotas.namespaces.{namespace}.{field} in the security file of the coordinator"
    )
