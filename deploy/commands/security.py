"""``sparserow security``: makes the certificates and tokens of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="Folder of the authority, certificates and tokens.")]
Hosts = Annotated[
    list[str], typer.Option("--host", help="Name or address under which clients reach a server; may be repeated.")
]
Valid = Annotated[str, typer.Option(help="How long the certificate is valid, such as 8760h.")]
Tokens = Annotated[Path, typer.Argument(help="The tokens file.")]


@app.callback()
def security() -> None:
    """Make certificates and tokens, or describe a security file."""


@app.command("init")
def init_(folder: Folder, hosts: Hosts = ["127.0.0.1", "localhost"], valid: Valid = "8760h") -> None:  # noqa: B006
    """Make an authority, a certificate for servers, an admin token, and the security file that names them."""
    from ...proto.options.units import parse_seconds
    from ..launch.security_files import init_security

    path = init_security(folder, hosts, valid_sec=round(parse_seconds(valid)))
    print(f"sparserow: {path} is ready: give it to servers and operators with `sparserow --security {path} COMMAND`")


@app.command("certificate")
def certificate_(
    folder: Folder,
    name: Annotated[str, typer.Argument(help="Name of the files NAME.pem and NAME.key.")],
    hosts: Hosts,
    valid: Valid = "8760h",
) -> None:
    """Sign another certificate with a folder's authority, or a newer certificate of the same name."""
    from ...proto.options.units import parse_seconds
    from ..launch.security_files import sign_certificate

    paths = sign_certificate(folder, name, hosts, valid_sec=round(parse_seconds(valid)))
    print(f"sparserow: wrote {paths[0]} and {paths[1]}")


@app.command("signing-key")
def signing_key_(
    folder: Annotated[Path, typer.Argument(help="Folder of the key pair, which is created when it does not exist.")],
    name: Annotated[str, typer.Argument(help="Name of the files NAME.key and NAME.pub.")],
) -> None:
    """Make a publisher's key pair: NAME.key signs published versions, and NAME.pub checks the signatures."""
    from ..launch.security_files import init_signing_key

    private, public = init_signing_key(folder, name)
    print(f"sparserow: wrote {private} (signing_key of the publisher) and {public} (verification_key of all others)")


@app.command("token")
def token_(
    tokens: Tokens,
    name: Annotated[str, typer.Argument(help="Name of the token in logs.")],
    role: Annotated[str, typer.Option(help="Role: serve-read, train or admin; each includes the roles before it.")],
    namespaces: Annotated[
        list[str] | None,
        typer.Option("--namespace", help="Namespace whose tables the token reaches; may be repeated. Default: all."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for the token, which its owner alone can read. Default: it is printed.")
    ] = None,
) -> None:
    """Make a token and give it once; the file of tokens has only its digest."""
    from ..launch.security_files import add_token

    token = add_token(tokens, name, role, namespaces or (), output=output)  # type: ignore[arg-type]  # checked there
    print(token if output is None else f"sparserow: the token is in {output}")


@app.command("revoke")
def revoke_(tokens: Tokens, name: Annotated[str, typer.Argument(help="Name of the token.")]) -> None:
    """Revoke a token; servers refuse it within seconds."""
    from ..launch.security_files import revoke_token

    revoke_token(tokens, name)
    print(f"sparserow: {name} is revoked")


@app.command("show")
def show_(path: Annotated[Path, typer.Argument(help="The security file.")]) -> None:
    """Describe a security file: certificates, validity, tokens."""
    from ...proto.security.security import Security
    from ..launch.security_files import describe_security

    for thing, state in describe_security(Security.load(path)):
        print(f"{thing:18} {state}")
