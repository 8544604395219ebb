"""The rendezvous of the agents of several nodes: torch's, in time, and with the addresses of those that are there."""

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from converters.common.errors import ConfigError, list_offenders
from titan_tools.launch.launch import Launch, Rendezvous
from trainer.ranks.process_group import address_towards
from trainer.ranks.rendezvous import CannotJoin, LostRank
from trainer.ranks.store import listening, open_store, reach

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_JOB = "titan"  # torch's run id: one job meets at one address
_COMPLETE = f"{_JOB}/complete"  # key of the store
_POLL_SECS = 0.1
_ATTEMPT_SECS = 2.0  # to connect, before it is looked again whether this node hosts the store: names may resolve later
_TORCH_SECS = 60  # from our timeout, which comes with a message, to torch's
_CLOSING_SECS = 2.0  # for other nodes to see that the rendezvous is closed, before its store ends


class Nodes(DynamicRendezvousHandler):
    """torch's handler for a fixed number of nodes. `join_nodes` makes it, and sets the attributes."""

    launch: Launch
    store: "Store"
    hosts_store: bool
    deadline: float
    is_complete: bool = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes; the one that hosts the store has the first ranks.

        Raises LostRank at the timeout, or if the job has all its nodes already, and ConfigError if nodes were started
        with different options.
        """
        this_node = self._this_node
        if self.store.check([_COMPLETE]):
            raise self._too_many()
        self.store.set(_key(this_node), json.dumps([*_options(self.launch), self.hosts_store]))
        results: list[Any] = []

        def join() -> None:
            try:
                results.append(DynamicRendezvousHandler.next_rendezvous(self))
            except Exception as error:
                results.append(error)

        attempt = Thread(target=join, daemon=True)  # torch lets a node that is too many wait without an end
        attempt.start()
        nodes: dict[Any, int] = {}
        try:
            while attempt.is_alive():
                attempt.join(_POLL_SECS)
                state = self._state_holder.state
                nodes = dict(state.participants)
                self._require_same_options(nodes)
                if state.complete and this_node not in nodes:
                    raise self._too_many()
                if time.monotonic() > self.deadline:
                    raise self._lost(nodes, f"joined within {_rendezvous(self.launch).timeout_secs} s")
        except dist.DistError as error:
            raise self._lost(nodes, "were there when the one that hosts the store ended") from error
        nodes = self._state_holder.state.participants
        if isinstance(results[0], RendezvousError):
            raise self._lost(nodes, "were there when one of them ended") from results[0]
        if isinstance(results[0], Exception):
            raise results[0]
        info = results[0]
        hosts_store = {node: json.loads(self.store.get(_key(node)))[-1] for node in nodes}
        self.store.set(_COMPLETE, "")
        self.is_complete = True
        self._stop_heartbeats()  # nothing asks the store any more, so its node may end before this one
        order = sorted(nodes, key=lambda node: (not hosts_store[node], nodes[node]))
        return RendezvousInfo(info.store, order.index(this_node), info.world_size, info.bootstrap_store_info)

    def num_nodes_waiting(self) -> int:
        """No node joins later."""
        return 0

    def shutdown(self) -> bool:
        """Tell nodes that still wait to end."""
        if self.is_complete:
            return True
        is_closed = super().shutdown()
        if self.hosts_store:
            time.sleep(_CLOSING_SECS)
        return is_closed

    def _require_same_options(self, nodes: Mapping[Any, int]) -> None:
        """Raise ConfigError if a node was started with other options than this one."""
        options = {node: json.loads(self.store.get(_key(node)))[:-1] for node in nodes}
        if any(each != _options(self.launch) for each in options.values()):
            lines = [
                f"{node.addr}: titan {' '.join(command)} --nnodes {num_nodes} --nproc {nproc}"
                for node, (num_nodes, nproc, command) in options.items()
            ]
            raise ConfigError(
                f"the nodes at {self.launch.rendezvous} were started with different options:" + list_offenders(lines),
                hint="the command must be the same on all nodes; another job needs another port",
            )

    def _too_many(self) -> LostRank:
        return LostRank(
            f"all {self.launch.nodes} nodes are at {self.launch.rendezvous} already, and this one is too many",
            hint="it is late, or the attempt before has not ended yet; another job needs another port",
        )

    def _lost(self, nodes: Mapping[Any, int], what: str) -> LostRank:
        addresses = ", ".join(sorted(node.addr for node in nodes)) or "none"
        return LostRank(
            f"{len(nodes)} of {self.launch.nodes} nodes {what}, at {self.launch.rendezvous}: {addresses}",
            hint="the others are missing or late, or have ended: their own output says more",
        )


def join_nodes(launch: Launch) -> Nodes:
    """The rendezvous of a launch, with its store open. Raises CannotJoin or LostRank if the address cannot be used."""
    place = _rendezvous(launch)
    deadline = time.monotonic() + place.timeout_secs
    store, hosts_store = _open(launch, place, deadline)
    nodes: Nodes = Nodes.from_backend(
        _JOB,
        store,
        C10dRendezvousBackend(store, _JOB),
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        local_addr=address_towards(place.host) or socket.gethostname(),
        timeout=RendezvousTimeout(join=timedelta(seconds=place.timeout_secs + _TORCH_SECS)),
    )
    nodes.launch, nodes.store, nodes.hosts_store, nodes.deadline = launch, store, hosts_store, deadline
    return nodes


def _open(launch: Launch, place: Rendezvous, deadline: float) -> "tuple[Store, bool]":
    """The store, and whether this process hosts it: the first agent on the machine that has the address."""
    failure = "no answer"
    while time.monotonic() < deadline:
        if _is_own(place.host):
            try:
                listening(place.port).close()
                return open_store(place.host, place.port, deadline, hosts=True), True
            except ConnectionError:
                pass  # another agent on this machine was faster
            except PermissionError as error:
                raise CannotJoin(
                    f"this node cannot listen on port {place.port} of --rdzv-endpoint {place}: {error.strerror}",
                    tries=[f"--rdzv-endpoint {place.host}:another port, the same on all nodes"],
                ) from None
            except OSError:
                pass  # in use: by another agent, or by another program
        failure = reach(place.host, place.port, min(deadline, time.monotonic() + _ATTEMPT_SECS))
        if not failure:
            try:
                return open_store(place.host, place.port, deadline, hosts=False), False
            except ConnectionError as error:
                raise CannotJoin(
                    f"what listens at --rdzv-endpoint {place} is not the store of a job: {error!s:.200}",
                    hint="another program uses that port, or the node that hosts the store has ended",
                    tries=[f"--rdzv-endpoint {place.host}:another port, the same on all nodes"],
                ) from error
    message = f"this node cannot reach --rdzv-endpoint {place} within {place.timeout_secs} s: {failure}"
    if "does not resolve" in failure:
        raise CannotJoin(message, hint="it is the name or address of one of the nodes, and a free port on it")
    raise LostRank(
        f"{message}; 1 of {launch.nodes} nodes is here",
        hint=f"the node {place.host} is missing or late, or has ended, or a firewall is between them",
    )


def _is_own(host: str) -> bool:
    """Whether a name or an address is one of this machine's: a socket can be bound to it."""
    with suppress(OSError, UnicodeError):
        for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return True
    return False


def _rendezvous(launch: Launch) -> Rendezvous:
    assert launch.rendezvous is not None, "a job of several nodes"
    return launch.rendezvous


def _options(launch: Launch) -> list[Any]:
    """The options that must be equal on all nodes, as JSON values."""
    return [launch.nodes, launch.nproc, [*launch.command]]


def _key(node: Any) -> str:
    return f"{_JOB}/{node}"
