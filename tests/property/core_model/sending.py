"""P's side of the model: what each message and each local event does, by the tables."""

from __future__ import annotations

from typing import Any

from tests.property.core_model.state import CLOSED, CoreState, ShipmentModel, State


class SenderModel:
    """P, over one state."""

    def __init__(self, world: CoreState) -> None:
        self.world = world
        self.setting = world.setting
        self.matched = 0  # the ask that a try is being matched with

    # Records

    def on_try(self, number: int, event: str) -> None:
        """Let something happen to a try."""
        item = self.world.tries[number]
        state, ask = item.state, item.ask
        row = self.setting.row("try", state, event)
        item.state = row.next
        if row.next != "paired":
            item.ask, item.taken = 0, 0 if row.next != "ended" else item.taken
        for action in row.actions:
            if action == "open shipments" and self.setting.pushes[number]:
                for rank in range(self.setting.num_ranks):
                    self._open(number, rank, 0)
            elif action == "bind":
                item.ask = self.matched
            elif action == "stop":
                for name in [m for m, ship in self.world.ships.items() if ship.of == number]:
                    self.stop(name)
            elif action == "turn the ask away":
                ticket = ", ticket" if self.setting.is_ticketed else ""
                for rank, heard in enumerate(self.world.heard):
                    if heard[ask] == "paired":
                        self.on_heard(rank, ask, "is turned away" + ticket)

    def on_heard(self, rank: int, number: int, event: str) -> None:
        """Let something happen to what is known of an ask."""
        heard = self.world.heard[rank]
        state = heard[number]
        row = self.setting.row("heard", state, event)
        heard[number] = row.next
        for action in row.actions:
            if action == "say GONE":
                self.world.send(True, rank, "GONE", number)
            elif action == "end by name":
                self._end_by_name(number)
            elif action == "end the try":
                self._end_try_of(rank, number)

    def on_out(self, name: int, index: int, event: str) -> None:
        """Let something happen to a chunk."""
        ship = self.world.ships[name]
        chunk = ship.chunks[index]
        row = self.setting.row("out", chunk[0], event)
        chunk[0] = row.next
        for action in row.actions:
            if action == "say OFFER":
                fields = (name, index, ship.lowest, ship.ask, chunk[1], ship.of)
                self.world.send(True, ship.rank, "OFFER", *fields)
            elif action == "say DONE":
                self.world.send(True, ship.rank, "DONE", name, index, ship.lowest)
            elif action == "ship again" and ship.status == "open":
                ship.chunks.append(["queued", chunk[1], None])
        if chunk[0] in CLOSED:
            self._look_at(name)

    # What follows

    def _open(self, number: int, rank: int, ask: int) -> None:
        world, blocks = self.world, range(self.setting.num_blocks)
        chunks = [["queued", block, None] for block in blocks]
        epoch = world.known_epochs[rank]
        world.made.append(number)
        world.ships[len(world.made)] = ShipmentModel(number, rank, ask, epoch, "open", chunks)

    def stop(self, name: int) -> None:
        """Stop a shipment; STOPPED follows when nothing of it can be written any more."""
        ship = self.world.ships[name]
        if ship.status == "open":
            ship.status = "stopping"
            for index, chunk in enumerate(ship.chunks):
                if chunk[0] not in CLOSED and name in self.world.ships:
                    self.on_out(name, index, "stop")
            self._look_at(name)

    def _look_at(self, name: int) -> None:
        """Close a shipment of which no chunk is open."""
        ship = self.world.ships.get(name)
        if ship is None or any(chunk[0] not in CLOSED for chunk in ship.chunks):
            return
        del self.world.ships[name]
        if ship.status == "stopping":
            if ship.epoch == self.world.known_epochs[ship.rank]:
                self.world.send(True, ship.rank, "STOPPED", name)
            return
        item = self.world.tries[ship.of]
        item.taken |= 1 << ship.rank
        if ship.ask and self.world.heard[ship.rank][ship.ask] == "paired":
            self.on_heard(ship.rank, ship.ask, "all is taken")
        if item.taken == (1 << self.setting.num_ranks) - 1:
            self.on_try(ship.of, "all is taken")

    def _end_by_name(self, number: int) -> None:
        """End what an ask that was never heard is about, by its ticket or its content."""
        content = self.setting.ask_contents[number - 1]
        for index, item in enumerate(self.world.tries):
            is_it = self.setting.try_contents[index] == content and item.state == "free"
            if is_it and (not self.setting.is_ticketed or self.ticket_of(number) == index):
                ticketed = ", ticketed" if self.setting.is_ticketed else ""
                self.on_try(index, "ask is over" + ticketed)
                return

    def _end_try_of(self, rank: int, number: int) -> None:
        for index, item in enumerate(self.world.tries):
            if item.state == "paired" and item.ask == number and not item.taken >> rank & 1:
                ticketed = ", ticketed" if self.setting.is_ticketed else ""
                self.on_try(index, "ask is over" + ticketed)

    def ticket_of(self, number: int) -> int:
        """The try that an ask's ticket names: the one with its own number."""
        return min(number, len(self.world.tries)) - 1

    def _is_ticket_over(self, number: int) -> bool:
        if not self.setting.is_ticketed:
            return False
        item = self.world.tries[self.ticket_of(number)]
        return item.state != "free" and (item.state, item.ask) != ("paired", number)

    def match(self) -> None:
        """Give each waiting ask a try of its content that serves no other."""
        world = self.world
        for number in range(1, len(self.setting.ask_contents) + 1):
            for rank in range(self.setting.num_ranks):
                if world.heard[rank][number] == "waiting":
                    self._match(rank, number)

    def _match(self, rank: int, number: int) -> None:
        world, content = self.world, self.setting.ask_contents[number - 1]
        tries = list(enumerate(world.tries))
        of_it = [index for index, item in tries if (item.state, item.ask) == ("paired", number)]
        free = [
            index
            for index, item in tries
            if item.state == "free" and self.setting.try_contents[index] == content
            and (not self.setting.is_ticketed or self.ticket_of(number) == index)
        ]  # fmt: skip
        if not of_it and not free:
            return
        index = of_it[0] if of_it else free[0]
        if not of_it:
            self.matched = number
            self.on_try(index, "ask is matched")
        self.on_heard(rank, number, "is matched")
        if world.tries[index].taken >> rank & 1:
            self.on_heard(rank, number, "all is taken")
            return
        for ship in world.ships.values():
            if ship.of == index and ship.status == "open" and not ship.ask:
                ship.ask = number
        if not any((s.of, s.rank, s.status) == (index, rank, "open") for s in world.ships.values()):
            self._open(index, rank, number)

    # Messages and peers

    def hear(self, rank: int, message: State) -> None:
        """Handle a message of D's."""
        kind, source, destination, lowest, *fields = message
        world = self.world
        if source < world.known_epochs[rank]:
            return
        if source > world.known_epochs[rank]:
            self.notice(rank, source)
        if destination != world.epoch:
            if kind != "HELLO":
                world.send(True, rank, "HELLO")
            return
        if kind in ("ASK", "RELEASE"):
            self._hear_of_ask(kind, rank, fields[0])
        elif kind == "STOP":
            self._hear_stop(rank, *fields)
        elif kind in ("HELLO", "PING"):
            pass
        elif fields[0] in world.ships:
            self._hear_of_chunk(kind, *fields)
        elif kind == "GRANT" and "answer" not in self.setting.without:
            world.send(True, rank, "STOPPED", fields[0])
        if lowest > world.heard_lowest[rank] and "lowest ask" not in self.setting.without:
            world.heard_lowest[rank] = lowest
            for number in range(1, min(lowest, len(world.heard[rank]))):
                if world.heard[rank][number] != "none":
                    self.on_heard(rank, number, "is over")
        self.match()

    def _hear_of_ask(self, kind: str, rank: int, number: int) -> None:
        if number < self.world.heard_lowest[rank]:
            return
        event = "is over" if kind == "RELEASE" else "ASK"
        if event == "ASK" and self.world.heard[rank][number] == "none":
            event += ", ticket is over" if self._is_ticket_over(number) else ""
        self.on_heard(rank, number, event)

    def _hear_stop(self, rank: int, name: int, is_claimed: int) -> None:
        ship = self.world.ships.get(name)
        if ship is None:
            if "answer" not in self.setting.without:
                self.world.send(True, rank, "STOPPED", name)
            return
        if ship.status != "open":
            return
        self.stop(name)
        if ship.ask and self.world.heard[rank][ship.ask] == "paired":
            if is_claimed:
                self.on_try(ship.of, "ask is over")  # and the ask is served anew
            else:
                self.on_heard(rank, ship.ask, "is over")
        elif not ship.ask and self.world.tries[ship.of].state == "free":
            self.on_try(ship.of, "ask is over")

    def _hear_of_chunk(self, kind: str, name: int, index: int, *region: Any) -> None:
        ship = self.world.ships[name]
        chunk = ship.chunks[index]
        if chunk[0] in CLOSED:
            return
        if kind == "GRANT" and chunk[0] == "offered":
            chunk[2] = region[0]
        self.on_out(name, index, kind)

    def notice(self, rank: int, epoch: int) -> None:
        """Learn that D was restarted: what was open with it is over."""
        world = self.world
        world.known_epochs[rank], world.heard_lowest[rank] = epoch, 1
        touched = {ship.of for ship in world.ships.values() if ship.rank == rank}
        for number in range(1, len(world.heard[rank])):
            if world.heard[rank][number] == "paired":
                touched |= {i for i, item in enumerate(world.tries) if item.ask == number}
        for index in sorted(touched):
            if world.tries[index].state in ("free", "paired"):
                self.on_try(index, "peer is over")
        world.heard[rank] = ["none"] * len(world.heard[rank])
        self.match()
