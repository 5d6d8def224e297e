"""Reconstruction of a ledger from its events."""

from coati.ledger.leases import Ledger
from coati.ledger.rules import LedgerRules


def replayed(rules, events):
    """Return the ledger after these events."""
    ledger = Ledger(rules)
    for event in events:
        kind = next(iter(event))
        if kind == "grant":
            for number in event["grant"]:
                ledger._apply_grant(number, event["maker"], event["version"])
        elif kind == "resume":
            state = event.get("state") or ledger.state()
            ledger = Ledger.restored(LedgerRules(**event["rules"]), state, first_epoch=event["first_epoch"])
        elif kind not in ("publish", "refuse"):
            ledger._change(event)
    return ledger
