"""What `nodectl bill` prints of a reply."""

from __future__ import annotations

from node.bill.reckoning import explain
from node.nodectl.commands.bill import _notes, _rows
from protos.service_pb2 import Bill, BilledBytes

GB = 10**9
BILL = Bill(
    since=1793487600,
    until=1795695600,
    timezone="Europe/Berlin",
    users=BilledBytes(received=GB, sent=9 * GB),
    inbounds=BilledBytes(received=GB, sent=9 * GB),
    outbounds=BilledBytes(received=9 * GB, sent=GB),
    interfaces=BilledBytes(received=21 * GB, sent=21 * GB),
    names=["eth0", "eth1"],
    controllers=BilledBytes(sent=GB),
    transports=["tls"],
)


def test_rows() -> None:
    """Each line has both directions and their sum, or the sum alone; those with a dash are parts of the interfaces'."""
    bill = Bill.FromString(BILL.SerializeToString())
    explain(bill)
    rows = {str(row[0]): row[1:] for row in _rows(bill)}
    assert [*rows] == [
        *("users", "inbounds", "outbounds", "interfaces (eth0, eth1)", "- controllers"),
        *("- in and out of the core", "- headers, TLS", "- other programs"),
    ]
    assert rows["users"] == (str(GB), str(9 * GB), str(10 * GB))
    assert rows["- in and out of the core"] == ("", "", str(20 * GB))
    assert sum(int(str(row[-1])) for name, row in rows.items() if name.startswith("- ")) == 42 * GB
    bill = Bill(users=BilledBytes(sent=GB))
    explain(bill)
    assert [*_rows(bill)][-1] == ("counted, not carried", "", "", str(2 * GB))


def test_notes() -> None:
    """The time in the node's zone, the ratio if there is one, the warnings."""
    bill = Bill.FromString(BILL.SerializeToString())
    explain(bill)
    time, ratio, warning = _notes(bill)
    assert time == "from 2026-11-01 00:00 to 2026-11-26 13:20 (Europe/Berlin)"
    assert ratio == (
        "4.10 bytes carried for each byte of users; 2.11 (large transfers) to 3.29 (small requests) on the network by "
        "tls, from 2.00 as the kernel counts"
    )
    assert warning.startswith("WARNING: the interfaces carried 8,")
    assert [*_notes(Bill(timezone="UTC"))] == ["from 1970-01-01 00:00 to 1970-01-01 00:00 (UTC)"]
