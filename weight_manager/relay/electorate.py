"""Which stores below take part in the running session: who must be waited for, who votes, who may still be serving."""

import hmac

from weight_manager.config import StoreConfig
from weight_manager.manifest import Layout
from weight_manager.push_session import PushSession
from weight_manager.relay import messages as wire
from weight_manager.relay.links import Links


class Electorate:
    """Reads the links; changes nothing."""

    def __init__(self, config: StoreConfig, links: Links) -> None:
        self._config = config
        self.links = links
        self._session: PushSession | None = None
        self._quorum = config.relay_policy == "quorum"

    def unstaged(self) -> list[str]:
        """Stores that the session still waits for."""
        return [link.name for link, part in self.links.taking_part() if not (part.staged or part.out)]

    def stores(self) -> int:
        """That are staged, this one included."""
        return 1 + sum(link.stores for link, part in self.links.taking_part() if part.staged and not part.out)

    def voters(self) -> dict[str, bool]:
        """Stores that vote in the commit -> whether it fails without them."""
        return {link.name: part.required for link, part in self.links.taking_part() if part.staged and not part.out}

    def outsiders(self, now: float) -> dict[str, str]:
        """Stores that do not vote but may be serving -> why they do not. One may have joined since the seal."""
        voters = self.voters()
        out = {
            link.name: (link.part and link.part.out) or "is not staged"
            for link in self.links.all()
            if link.name not in voters and link.serves_until > now
        }
        return out | {name: "is away" for name, until in self.links.absent.items() if until > now}

    def serving(self, now: float) -> bool:
        """Whether a store below may be."""
        return any(until > now for until in (*(k.serves_until for k in self.links.all()), *self.links.absent.values()))

    def serves_until(self, name: str) -> float:
        """Until when a store may serve if it hears nothing more."""
        link = self.links.named(name)
        return link.serves_until if link else self.links.absent.get(name, 0.0)

    def needed(self) -> int:
        """Stores that must take part in the commit, this one included."""
        if self._session is None or self._session.intent.source == "relay" or not self._quorum:
            return 1
        total = 1 + sum(link.stores for link in self.links.all())
        return self._config.relay_quorum or total // 2 + 1


def why_not(join: wire.Join, token: str | None, layout: Layout) -> str:
    """Why this store cannot join; "" if it can."""
    if not hmac.compare_digest(join.token.encode(), (token or "").encode()):
        return "the token is wrong or missing"
    if join.protocol != wire.RELAY_PROTOCOL:
        return f"relay protocol {join.protocol}, this store speaks {wire.RELAY_PROTOCOL}: use the same release"
    if join.layout_digest != layout.digest:
        return "another layout: model config, dtype and tp must be the same on all stores"
    return ""
