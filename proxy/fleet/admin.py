"""Admin: adds, drains and removes instances, and changes their roles, for a holder of the admin
key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from p2p_engine.errors import RemoteProtocolError
from proxy.errors import ProxyError
from proxy.fleet.instances import Instance, Role
from proxy.fleet.key_files import read_key
from proxy.fleet.registry import RegistryFull
from proxy.fleet.tries import Tries

if TYPE_CHECKING:
    from collections.abc import Callable

    from werkzeug.datastructures import Headers

    from proxy.config import ProxyConfig
    from proxy.fleet.registry import Registry

logger = logging.getLogger(__name__)

_ROLES = {
    "prefill": [Role.PREFILL], "decode": [Role.DECODE], "both": list(Role),
    "P": [Role.PREFILL], "D": [Role.DECODE], "PD": list(Role),
}  # fmt: skip


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    """The instances of a request. Both keys are accepted, because other routers use either; some
    send the type also to remove."""

    instance: str = ""
    instances: str | list[str] = []
    type: str = ""

    def addresses(self) -> list[str]:
        several = [self.instances] if isinstance(self.instances, str) else self.instances
        addresses = [address for address in (self.instance, *several) if address]
        if not addresses:
            raise ProxyError(400, "invalid_request", "`instance` is missing: host:port")
        return addresses


class _Addition(_Named):
    zmq_address: str = ""
    model: str = ""


class _Removal(_Named):
    drain: bool = True
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None


class Admin:
    """Handles the admin requests; disabled without a key file.

    Only the key's hash is kept, and it is compared in constant time. Wrong keys are counted, and
    pages of other sites are refused.
    """

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        on_instance: Callable[[Instance], None],
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._on_instance = on_instance
        self._clock = clock
        self._drain_timeout_seconds = config.drain_timeout_seconds
        self._key_file = config.admin_key_file
        self._key_hash = _read_key_hash(self._key_file)
        self._tries = Tries()

    def reload(self) -> None:
        """Read the key again.

        Raises:
            ConfigError: it cannot be read; the old one stays.
        """
        self._key_hash = _read_key_hash(self._key_file)

    def authorize(self, headers: Headers, address: str) -> None:
        """Check the admin key of a request from an address.

        Raises:
            ProxyError: 403 if the proxy has no admin key, or a page of another site asks; 401 if
                the given key is missing or wrong; 429 if there were too many wrong ones.
        """
        if self._key_hash is None:
            raise ProxyError(
                403, "admin_disabled", "this proxy was started without --admin-key-file"
            )
        _refuse_other_sites(headers)
        now = self._clock()
        if wait := self._tries.wait(address, now):
            message = f"too many wrong admin keys; try again in {math.ceil(wait)} s"
            raise ProxyError(429, "too_many_tries", message, retry_after=wait)
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        given = headers.get("X-Api-Key", "") or bearer
        if not hmac.compare_digest(_hash(given), self._key_hash):
            if given:  # to give none is no try
                self._tries.fail(address, now)
            raise ProxyError(401, "unauthorized", "the admin key is missing or wrong")
        self._tries.succeed(address)

    def add(self, body: bytes, sender: str) -> dict[str, Any]:
        """Add instances that send no heartbeats, or resume draining ones, for an admin.

        Raises:
            ProxyError: 400, the body or an address is invalid; 409, the registry is full.
        """
        asked = decoded(body, _Addition)
        addresses = asked.addresses()
        roles = _ROLES.get(asked.type)
        known = [self._registry.find(address) for address in addresses]
        if roles is None and None in known:
            raise ProxyError(400, "invalid_request", f"`type` is none of {', '.join(_ROLES)}")
        try:
            added = [self._add(address, roles or [], asked) for address in addresses]
        except RemoteProtocolError as error:
            raise ProxyError(400, "invalid_address", str(error)) from error
        except RegistryFull as error:
            raise ProxyError(409, "registry_full", str(error)) from error
        for instance in added:
            logger.info("instance added http=%s by=%s", instance.identity.name, sender)
        kind = f" to {asked.type}_instances" if asked.type else ""
        return self._answer(f"Added {', '.join(addresses)}{kind}.", added)

    def remove(self, body: bytes, sender: str) -> dict[str, Any]:
        """Drain instances: they get no new requests, and are removed when their requests have
        ended.

        Raises:
            ProxyError: 400, the body is invalid; 404, an instance is not registered.
        """
        asked = decoded(body, _Removal)
        removed = self._find(asked)
        seconds = asked.timeout_seconds
        if seconds is None:
            seconds = self._drain_timeout_seconds
        now = self._clock()
        for instance in removed:
            instance.drains_until = now + (seconds if asked.drain else 0.0)
            name = instance.identity.name
            logger.info("instance removed http=%s by=%s drain=%s", name, sender, asked.drain)
        answer = self._answer(f"Removing {', '.join(asked.addresses())}.", removed)
        self._registry.sweep(now)
        return answer

    def change(self, body: bytes, sender: str) -> dict[str, Any]:
        """Change the roles of instances, among those that they announce. A role that one did not
        have begins when its requests in the roles that it loses have ended.

        Raises:
            ProxyError: 400, the body is invalid; 404, an instance is not registered; 409, one of
                them was not started for this role.
        """
        asked = decoded(body, _Named)
        roles = _ROLES.get(asked.type)
        if roles is None:
            raise ProxyError(400, "invalid_request", f"`type` is none of {', '.join(_ROLES)}")
        changed, now = self._find(asked), self._clock()
        for instance in changed:
            missing = [role.label for role in roles if not instance.has_role(role, now)]
            if missing:
                message = f"{instance.identity.name} does not announce {' and '.join(missing)}"
                raise ProxyError(409, "role_not_announced", message)
        for instance in changed:
            instance.assign(roles)
            name = instance.identity.name
            logger.info("role changed http=%s to=%s by=%s", name, asked.type, sender)
        self._registry.on_room()
        return self._answer(f"Changing {', '.join(asked.addresses())} to {asked.type}.", changed)

    def _find(self, asked: _Named) -> list[Instance]:
        found = {address: self._registry.find(address) for address in asked.addresses()}
        unknown = [address for address, instance in found.items() if instance is None]
        if unknown:
            raise ProxyError(404, "unknown_instance", f"{', '.join(unknown)} is not registered")
        return [instance for instance in found.values() if instance is not None]

    def _add(self, address: str, roles: list[Role], asked: _Addition) -> Instance:
        instance, is_new = self._registry.add(
            address, roles, self._clock(), asked.zmq_address, asked.model
        )
        if is_new:
            self._on_instance(instance)
        return instance

    def _answer(self, message: str, instances: list[Instance]) -> dict[str, Any]:
        now = self._clock()
        shown = [
            {"instance": i.identity.name, "state": i.state(now), "roles": i.labels(now)}
            for i in instances
        ]
        return {"message": message, "instances": shown}


def _refuse_other_sites(headers: Headers) -> None:
    """Refuse what a browser sends for a page of another site, or as a plain form.

    Browsers say on their own where a request comes from. Programs say nothing of it.
    """
    site, origin = headers.get("Sec-Fetch-Site", ""), headers.get("Origin", "")
    if not site and not origin:
        return
    is_own = origin.lower().partition("://")[2] == headers.get("Host", "").lower()
    if site not in ("same-origin", "none") if site else not is_own:
        raise ProxyError(403, "cross_site", "a page of another site may not give orders")
    if headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
        raise ProxyError(403, "cross_site", "a page must send its order as application/json")


def decoded(body: bytes, kind: type[Any]) -> Any:
    """Return an order from its body.

    Raises:
        ProxyError: 400, it is none of this kind.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProxyError(400, "invalid_request", str(error)) from error


def _read_key_hash(path: str) -> bytes | None:
    key = read_key("admin_key_file", path)
    return _hash(key) if key else None


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()
