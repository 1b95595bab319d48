"""The settings of the ports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from node.base.settings import (
    Options,
    Reading,
    chosen,
    host_name,
    host_port,
    is_file,
    names,
    path,
    port,
    setting,
    switch,
    word,
)

# Addresses to call, by those listened on.
_LOOPBACK = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104


@dataclass(frozen=True)
class DoorOptions(Options):
    """Where controllers reach the node, and what TLS asks of them. A port of None is not opened."""

    host: str = setting("NODE_HOST").help(
        "IP address to listen on (default: all addresses, IPv4 and IPv6)",
        "Set it if controllers should reach the node by one address only, such as that of a VPN. The inbounds "
        "of the core listen where the configuration says.",
    )
    rest_port: int | None = setting("REST_PORT", "62051", port).help(
        "TCP port of the REST interface, 1 to 65535",
        "Change it if another program has the port, or if the panel expects another one. See [Ports](#ports).",
    )
    grpc_port: int | None = setting("GRPC_PORT", "62050", port).help(
        "TCP port of the gRPC interface, 1 to 65535",
        "Change it for the same reasons as REST_PORT.",
    )
    protocol: str = setting("SERVICE_PROTOCOL", read=word("", "rest", "grpc")).help(
        "serve this protocol, rest or grpc, on SERVICE_PORT, and the other one only if its own port is set",
        "For settings that come from another node; new installs need only REST_PORT and GRPC_PORT. See "
        "[Ports](#ports).",
    )
    service_port: int | None = setting("SERVICE_PORT", read=port).help(
        "TCP port of SERVICE_PROTOCOL, or of gRPC if that is not set, 1 to 65535",
        "For settings that come from another node.",
    )
    cert_file: Path = setting("SSL_CERT_FILE", read=path).help(
        "PEM file with the node's certificate chain, the node's own certificate first (default: certificate.pem in "
        "STATE_DIR)",
        "Reloaded when it changes. Set it to serve a certificate that another program renews. OpenSSL reads a "
        "variable of this name, too: see [The certificate](#the-certificate).",
    )
    key_file: Path = setting("SSL_KEY_FILE", read=path).help(
        "PEM file with the private key of SSL_CERT_FILE, without a passphrase (default: key.pem in STATE_DIR)",
        "Reloaded when it changes. Set it together with SSL_CERT_FILE.",
    )
    sans: tuple[str, ...] = setting("SSL_SANS", read=names).help(
        "further names and addresses, comma-separated, for the certificate that `nodectl certificate make` makes",
        "Set it where controllers use a name or an address that the machine does not have itself, as behind "
        "NAT. A certificate that exists stays as it is.",
    )
    client_ca: Path | None = setting("CLIENT_CA", read=path).help(
        "PEM file of certificate authorities; clients must then present a certificate issued by one of them",
        "Reloaded when it changes. Set it to turn strangers away during the TLS handshake, before any request. "
        "See [Certificates of controllers](#certificates-of-controllers).",
    )
    newest_tls: bool = setting("TLS_MIN", "1.2", chosen("1.3", "1.2")).help(
        "oldest TLS version that the node accepts: 1.2 or 1.3",
        "Set 1.3 when all your controllers speak it.",
    )
    strangers: str = setting("STRANGERS", "answer", word("answer", "close", "decoy")).help(
        "what clients get that do not ask for DOOR_NAME: answer (the node's certificate), close (the end of the "
        "connection) or decoy (what a web server replies)",
        "Set it to hide the node from scans. The panel must know the node by DOOR_NAME then. See "
        "[security.md](security.md#strangers-at-a-closed-door).",
    )
    name: str = setting("DOOR_NAME", "auto", host_name, secret=True).help(
        "with STRANGERS=close or decoy: the secret host name by which clients ask for the node (SNI), or auto: a name "
        "made from API_KEY",
        "Set a name for deployed panels: the host name under which the panel has the node. Our own client and "
        "`nodectl` know `auto`.",
    )
    decoy: tuple[str, int] | None = setting("DECOY", read=host_port).help(
        "with STRANGERS=decoy: HOST:PORT of the web server, with TLS, that strangers get",
        "Set it to a web server on this machine.",
    )
    debug: bool = setting("DEBUG", "0", switch).help(
        "1 or 0: also log every REST request, with method, path, status, time and address",
        "Turn it on to see what a controller asks. Bodies and headers are never logged.",
    )

    @property
    def own_address(self) -> str:
        """Where a client on this machine calls the node: without a name, as some machines know no `localhost`."""
        return _LOOPBACK.get(self.host, self.host)

    def complete(self, reading: Reading) -> Self:
        """Choose the ports, and check that the files exist."""
        chosen = self.protocol or ("grpc" if self.service_port else "")
        rest = self._port("rest", "REST_PORT", self.rest_port, chosen, reading)
        grpc = self._port("grpc", "GRPC_PORT", self.grpc_port, chosen, reading)
        if rest and rest == grpc and not reading.faulty & {"REST_PORT", "GRPC_PORT"}:
            reading.refuse("REST_PORT", f"REST_PORT and GRPC_PORT are both {rest}: set two different ports")
        if self.client_ca is not None and not is_file(self.client_ca):
            reading.refuse("CLIENT_CA", f"CLIENT_CA: there is no file {self.client_ca}")
        if self.strangers == "decoy" and not reading.faulty & {"DECOY"}:
            self._check_decoy((rest, grpc), reading)
        return replace(
            self,
            rest_port=rest,
            grpc_port=grpc,
            decoy=self.decoy if self.strangers == "decoy" else None,
            cert_file=_file("SSL_CERT_FILE", self.cert_file or reading.state_dir / "certificate.pem", reading),
            key_file=_file("SSL_KEY_FILE", self.key_file or reading.state_dir / "key.pem", reading),
        )

    def _check_decoy(self, own: tuple[int | None, ...], reading: Reading) -> None:
        host, port = self.decoy or ("", 0)
        if not host:
            reading.refuse("DECOY", "DECOY is not set: STRANGERS=decoy needs the HOST:PORT of a web server")
        elif port in own and host in (self.host, "localhost", "127.0.0.1", "::1"):
            reading.refuse("DECOY", f"DECOY: {port} is the node's own port: set that of a web server")

    def _port(self, protocol: str, name: str, own: int | None, chosen: str, reading: Reading) -> int | None:
        """The port of a protocol. Deployed nodes have one protocol on one port, by SERVICE_PORT."""
        if chosen == protocol and self.service_port:
            reading.forgive(name)
            return self.service_port
        return None if chosen not in ("", protocol) and name not in reading.explicit else own


def _file(name: str, file: Path, reading: Reading) -> Path:
    if name not in reading.faulty and not is_file(file):
        reading.refuse(
            name,
            f"{name}: there is no file {file}; `nodectl certificate make` makes a certificate and key in STATE_DIR",
        )
    return file
