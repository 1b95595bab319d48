"""A user with only credentials that no driver can use is refused."""

from __future__ import annotations

import pytest

from drivers.process.credentials import require_usable
from node.contract.accounts import Unusable
from protos.service_pb2 import Hysteria, Masque, Proxy, Shadowsocks, Trojan, User, Vless, Vmess, Wireguard

MASQUE = Masque(**{"pass": "secret"})


def test_masque_alone_is_refused() -> None:
    """A user with only a masque credential is refused; the reason names masque, not the secret."""
    empty = Proxy(vless=Vless(flow="x"), vmess=Vmess(), trojan=Trojan(), shadowsocks=Shadowsocks(method="x"))
    for proxies in (Proxy(masque=MASQUE), Proxy(masque=MASQUE, vless=empty.vless, trojan=empty.trojan)):
        with pytest.raises(Unusable, match="masque") as unusable:
            require_usable(User(email="42", proxies=proxies))
        assert "secret" not in str(unusable.value)


@pytest.mark.parametrize(
    "proxies",
    [
        Proxy(),
        Proxy(masque=Masque()),
        Proxy(masque=MASQUE, vmess=Vmess(id="x")),
        Proxy(masque=MASQUE, vless=Vless(id="x")),
        Proxy(masque=MASQUE, trojan=Trojan(password="x")),
        Proxy(masque=MASQUE, shadowsocks=Shadowsocks(password="x")),
        Proxy(masque=MASQUE, hysteria=Hysteria(auth="x")),
        Proxy(masque=MASQUE, wireguard=Wireguard(public_key="x")),
    ],
)
def test_masque_beside_others_is_ignored(proxies: Proxy) -> None:
    """Controllers send every credential of a user; unsupported or empty ones beside others are no error."""
    require_usable(User(email="42", proxies=proxies))
