"""``sparserow doctor``: finds problems of a machine, its files and its cluster, and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the findings to, as JSON.")] = None,
) -> None:
    """Check machine, config, ports, certificates, disks and cluster. Exit code 1 when something is wrong.

    The checked certificates are those of the file that `sparserow --security FILE doctor` names.
    """
    from dataclasses import asdict

    from rich.table import Table

    from ...proto.config.units import parse_bytes
    from ...proto.errors import InvalidArgument
    from ...proto.security.security import process_security
    from ..preflight.health_checks import (
        check_disk,
        check_job,
        check_machine,
        check_ports,
        machine_facts,
    )
    from ..preflight.peer_checks import check_certificates, check_cluster
    from .result_file import check_result_file, write_result
    from .terminal import tables_console

    check_result_file(json_file)
    if disk_bytes != "1GiB" and not disk:
        raise InvalidArgument("--disk-bytes: has no effect without --disk; name the folders")
    security = process_security()
    findings = list(check_machine(machine_facts(), parse_bytes(memory_budget)))
    if job is not None:
        findings += check_job(job)
    findings += check_ports(listen or ())
    findings += check_certificates(security, host or ())
    for folder in disk or ():
        findings += check_disk(folder, parse_bytes(disk_bytes))
    if coordinator is not None:
        findings += check_cluster(coordinator, security)

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    colors = {"ok": "green", "warning": "yellow", "wrong": "red"}
    for each in findings:
        told = each.text + (f"\n-> {each.remedy}" if each.remedy else "")
        table.add_row(each.area, f"[{colors[each.level]}]{each.level}[/]", told)
    tables_console().print(table)
    write_result(json_file, {"findings": [asdict(each) for each in findings]})
    wrong = sum(each.level == "wrong" for each in findings)
    typer.echo(f"{wrong} of {len(findings)} findings are wrong" if wrong else "nothing is wrong")
    if wrong:
        raise typer.Exit(1)
