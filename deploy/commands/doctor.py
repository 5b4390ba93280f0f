"""``sparserow doctor``: finds problems of a machine, its files and its cluster, and says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..preflight.finding import Finding
    from ..preflight.node_check import CheckSettings


def doctor(
    *,
    job: Annotated[Path | None, typer.Option(help="Job file to check.")] = None,
    coordinator: Annotated[
        str | None, typer.Option(help="HOST:PORT of the coordinator of a cluster that must be reachable.")
    ] = None,
    listen: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT on which a server is to listen; may be repeated.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address under which clients reach this machine's servers; may be repeated."),
    ] = None,
    disk: Annotated[
        list[Path] | None, typer.Option(help="Folder of rows, checkpoints or state; may be repeated.")
    ] = None,
    disk_bytes: Annotated[str, typer.Option(help="Free space that each --disk must have, such as 100GiB.")] = "1GiB",
    memory_budget: Annotated[
        str, typer.Option(help="Budget of all shards on this machine together, such as 8GiB; 0: not known.")
    ] = "0",
    nodes: Annotated[
        bool,
        typer.Option("--nodes", help="Check each node of torchrun or Ray instead: matrices, exchange and disk."),
    ] = False,
    slower_than: Annotated[
        float, typer.Option(help="With --nodes: the factor above the median from which a node is slow.")
    ] = 2.0,
    timeout: Annotated[
        str, typer.Option(help="With --nodes: the time to arrive, and for each part of the check.")
    ] = "60s",
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the findings to, as JSON.")] = None,
) -> None:
    """Check installation, machine, config, ports, certificates, disks and cluster. Exit code 1 when something is wrong.

    A part that is absent and not always needed is not wrong. The checked certificates are those of the file that
    `sparserow --security FILE doctor` names.
    """
    from ...proto.errors import InvalidArgument, not_allowed
    from .result_file import check_result_file

    check_result_file(json_file)
    if nodes:
        here = {"--job": job, "--coordinator": coordinator, "--listen": listen, "--host": host}
        given = [option for option, value in here.items() if value]
        given += [] if disk_bytes == "1GiB" else ["--disk-bytes"]
        given += [] if memory_budget == "0" else ["--memory-budget"]
        if given:
            raise InvalidArgument(f"{given[0]}: has no effect with --nodes, which checks other things; remove it")
        if len(disk or ()) > 1:
            raise not_allowed("--disk", [str(each) for each in disk or ()], "one folder with --nodes")
        from .node_doctor import check_all_nodes

        check_all_nodes(_settings(slower_than, timeout, disk[0] if disk else None), json_file)
        return
    if slower_than != 2.0 or timeout != "60s":
        option = "--timeout" if slower_than == 2.0 else "--slower-than"
        raise InvalidArgument(f"{option}: has no effect without --nodes; remove it")
    if disk_bytes != "1GiB" and not disk:
        raise InvalidArgument("--disk-bytes: has no effect without --disk; name the folders")
    from ..preflight.installed_parts import check_parts

    findings = check_parts()
    unusable = [each.area for each in findings if each.area in ("packages", "core") and each.level == "wrong"]
    if not unusable:  # the other checks import both
        has_torch = any(each.area == "torch" and each.level == "ok" for each in findings)
        findings += _other_findings(
            job=job,
            has_torch=has_torch,
            coordinator=coordinator,
            listen=listen or (),
            host=host or (),
            disk=disk or (),
            disk_bytes=disk_bytes,
            memory_budget=memory_budget,
        )
    _show(findings, json_file)
    if unusable:
        typer.echo(f"nothing else was checked, as that needs the {' and the '.join(unusable)}")
    wrong = sum(each.level == "wrong" for each in findings)
    typer.echo(f"{wrong} of {len(findings)} findings are wrong" if wrong else "nothing is wrong")
    if wrong:
        raise typer.Exit(1)


def _other_findings(
    *,
    job: Path | None,
    has_torch: bool,
    coordinator: str | None,
    listen: Sequence[str],
    host: Sequence[str],
    disk: Sequence[Path],
    disk_bytes: str,
    memory_budget: str,
) -> list[Finding]:
    """Returns the findings of the machine and of what the options name."""
    from ...proto.options.units import parse_bytes
    from ...proto.security.security import process_security
    from ..preflight.health_checks import check_disk, check_job, check_machine, check_ports, machine_facts
    from ..preflight.peer_checks import check_certificates, check_cluster

    security = process_security()
    findings = list(check_machine(machine_facts(), parse_bytes(memory_budget)))
    if job is not None:
        findings += check_job(job, has_torch=has_torch)
    findings += check_ports(listen)
    findings += check_certificates(security, host)
    for folder in disk:
        findings += check_disk(folder, parse_bytes(disk_bytes))
    if coordinator is not None:
        findings += check_cluster(coordinator, security)
    return findings


def _show(findings: Sequence[Finding], json_file: Path | None) -> None:
    """Prints the findings as a table, and writes them to the file, if there is one."""
    from dataclasses import asdict

    from rich.markup import escape
    from rich.table import Table

    from .result_file import write_result
    from .terminal import tables_console

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    colors = {"ok": "green", "absent": "cyan", "warning": "yellow", "wrong": "red"}
    for each in findings:
        text = each.text + (f"\n-> {each.remedy}" if each.remedy else "")
        table.add_row(each.area, f"[{colors[each.level]}]{each.level}[/]", escape(text))
    tables_console().print(table)
    write_result(json_file, {"findings": [asdict(each) for each in findings]})


def _settings(slower_than: float, timeout: str, folder: Path | None) -> CheckSettings:
    """Returns the settings of a check of nodes; the section ``train.node_check`` has the same options and bounds."""
    from ...proto.config.node_check_config import NodeCheckConfig
    from ...proto.options.document import validate
    from ..preflight.node_check import CheckSettings

    config = validate(NodeCheckConfig, {"slower_than": slower_than, "timeout": timeout})
    return CheckSettings.of(config, folder)
