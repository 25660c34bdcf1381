"""D's side of the model: what each message and each local event does on one rank, by the tables."""

from __future__ import annotations

from tests.property.core_model.state import (
    NO_REGION,
    OPEN_ASKS,
    ArrivingChunk,
    ChunkName,
    CoreState,
    ReceivingRank,
    State,
)

STOPPED = -1


class ReceiverModel:
    """One rank of D, over one state."""

    def __init__(self, world: CoreState, rank: int) -> None:
        self.world = world
        self.setting = world.setting
        self.number = rank
        self.rank: ReceivingRank = world.ranks[rank]
        self.is_claimed = False  # what STOP is said of, for another ask than P says

    # Records

    def on_ask(self, number: int, event: str) -> None:
        """Let something happen to an ask."""
        ask = self.rank.asks[number]
        row = self.setting.row("ask", ask[0], event)
        ask[0] = row.next
        for action in row.actions:
            if action.startswith("say "):
                self._say(action[4:], number)
            elif action == "place":
                self._place(number)
            elif action in ("stop the rest", "stop all"):
                self._stop(number, is_all=action == "stop all")
        self._look_at(number)

    def on_row(self, name: ChunkName, event: str) -> None:
        """Let something happen to a chunk that comes in."""
        row = self.rank.rows.get(name)
        state = row.state if row is not None else "none"
        found = self.setting.row("in", state, event)
        for action in found.actions:
            if action == "free" and row is not None:
                if row.region >= 0:
                    self.rank.words[row.region] = None
                row.region = NO_REGION
            elif action == "say STOP":
                self._say("STOP", name[0], int(self.is_claimed))
            elif action.startswith("say "):
                fields = (row.region,) if action == "say GRANT" and row is not None else ()
                self._say(action[4:], *name, *fields)
        if row is not None:
            row.state = found.next
            if found.next == "none":
                del self.rank.rows[name]

    def _say(self, kind: str, *fields: int) -> None:
        self.world.send(False, self.number, kind, *fields)

    # What follows

    def begin(self, number: int) -> None:
        """D's scheduler knows a request: ask, and claim what has come already."""
        self.rank.asks[number] = ["none", 0]
        for name, ask in self.rank.bound.items():
            if ask == 0 and self._content_of(name) == self.setting.ask_contents[number - 1]:
                self.rank.bound[name] = number
        self.on_ask(number, "request comes")

    def _content_of(self, name: int) -> int:
        """The content of a shipment; its OFFER has said it."""
        return self.setting.try_contents[self.world.made[name - 1]]

    def here(self, number: int) -> int:
        """The blocks of an ask that are in place or have landed, as bits."""
        blocks: int = self.rank.asks[number][1]
        for (name, _), row in self.rank.rows.items():
            if row.state == "landed" and self.rank.bound.get(name) == number:
                blocks |= 1 << row.block
        return blocks

    def _place(self, number: int) -> None:
        """Copy what has landed into the request's blocks."""
        for name, row in list(self.rank.rows.items()):
            if row.state == "landed" and self.rank.bound.get(name[0]) == number:
                self.rank.asks[number][1] |= 1 << row.block
                self.on_row(name, "is in place")
        self._tidy()

    def _look_at(self, number: int) -> None:
        """See whether an ask has all that it wants."""
        ask = self.rank.asks[number]
        if ask[0] == "loading":
            self._place(number)
        if self.here(number) == (1 << self.setting.num_blocks) - 1:
            if ask[0] == "wanted":
                self.on_ask(number, "all has landed")
            elif ask[0] == "loading":
                self.on_ask(number, "all is in place")

    def _stop(self, number: int, *, is_all: bool) -> None:
        for name, row in list(self.rank.rows.items()):
            is_stopped = row.state == "granted" or (is_all and row.state == "landed")
            if is_stopped and self.rank.bound.get(name[0]) == number:
                self.on_row(name, "stop")
        self._tidy()

    def prove(self, name: ChunkName) -> None:
        """The process that wrote a chunk is proven to have ended."""
        self.on_row(name, "proof of death")
        self._tidy()

    def lapse(self, name: int) -> None:
        """The lease of a provisional shipment is over."""
        self.rank.bound[name] = STOPPED
        for each in [each for each in self.rank.rows if each[0] == name]:
            self.on_row(each, "stop")
        self._tidy()

    def _tidy(self) -> None:
        """Forget what is over on both sides."""
        rank = self.rank
        for name, row in list(rank.rows.items()):
            if row.state in ("committed", "lost") and name[0] < rank.lowest:
                self.on_row(name, "writer is gone")
        with_rows = {name for name, _ in rank.rows}
        for shipment in [each for each in rank.bound if each < rank.lowest]:
            if shipment not in with_rows:
                del rank.bound[shipment]
                rank.lowest_chunks.pop(shipment, None)

    # Messages and peers

    def hear(self, message: State) -> None:
        """Handle a message of P's."""
        kind, source, destination, lowest, *fields = message
        rank = self.rank
        if source < rank.sender_epoch:
            return
        if source > rank.sender_epoch:
            self.notice(source)
        if destination != rank.epoch:
            if kind != "HELLO":
                self._say("HELLO")
            return
        if lowest > rank.lowest and "lowest shipment" not in self.setting.without:
            rank.lowest = lowest
            for name, row in list(rank.rows.items()):
                if name[0] < lowest and not row.has_died:  # else only proof says so
                    self.on_row(name, "writer is gone")
            self._tidy()
        if kind == "GONE":
            if rank.asks[fields[0]][0] in OPEN_ASKS:
                self.on_ask(fields[0], "GONE")
        elif kind == "STOPPED":
            self._hear_stopped(fields[0])
        elif kind in ("OFFER", "DONE") and self._may_be_open(fields[0]):
            self._hear_of_chunk(kind, *fields)
        self.look_at_all()

    def look_at_all(self) -> None:
        """See what each ask has now, and forget what is over."""
        for number in range(1, len(self.rank.asks)):
            self._look_at(number)
        self._tidy()

    def _may_be_open(self, name: int) -> bool:
        return name >= self.rank.lowest or "below is over" in self.setting.without

    def _hear_stopped(self, name: int) -> None:
        if "silence" in self.setting.without:
            self._say("STOP", name, 0)
        for each in [each for each in self.rank.rows if each[0] == name]:
            self.on_row(each, "writer is gone")
        if not any(each[0] == name for each in self.rank.rows):
            self.rank.bound.pop(name, None)
            self.rank.lowest_chunks.pop(name, None)

    def _hear_of_chunk(self, kind: str, name: int, index: int, lowest: int, *fields: int) -> None:
        rank = self.rank
        if index < rank.lowest_chunks.get(name, 0):
            return
        if lowest > 0 and "lowest chunk" not in self.setting.without:
            rank.lowest_chunks[name] = max(lowest, rank.lowest_chunks.get(name, 0))
            for each in [each for each in rank.rows if each[0] == name and each[1] < lowest]:
                self.on_row(each, "writer is gone")
        if kind == "DONE":
            self._hear_done((name, index))
        else:
            self._hear_offer((name, index), *fields)

    def _hear_done(self, name: ChunkName) -> None:
        row = self.rank.rows.get(name)
        word = self.rank.words[row.region] if row is not None and row.region >= 0 else None
        if row is not None and row.state == "granted" and word == name:
            self.on_row(name, "word")
        elif row is not None and row.state == "granted" and word == ("lost", name):
            self.on_row(name, "DONE, word was lost")
        else:
            self.on_row(name, "DONE")

    def _hear_offer(self, name: ChunkName, ask: int, block: int, of: int) -> None:
        content = self.setting.try_contents[of]
        if not self._bind(name[0], ask, content):
            is_known, asks = name in self.rank.rows, self.rank.asks
            self.is_claimed = ask > 0 and asks[ask][0] in OPEN_ASKS
            self.on_row(name, "OFFER" if is_known else "OFFER, it is over")
            return
        if name in self.rank.rows:
            self.on_row(name, "OFFER")
            return
        bound, free = self.rank.bound[name[0]], self._free_region()
        if bound > 0 and self.here(bound) >> block & 1:
            event, region = "OFFER, nothing is lacked", NO_REGION
        elif free is not None:
            event, region = "OFFER, there is room", free
        else:
            self.on_row(name, "OFFER, no room")
            return
        found = self.setting.row("in", "none", event)
        self.rank.rows[name] = ArrivingChunk(found.next, region, block)
        self._say("GRANT", *name, region)

    def _bind(self, name: int, ask: int, content: int) -> bool:
        """Note which ask a shipment is for; returns False if that is over."""
        rank, asks = self.rank, self.rank.asks
        known = rank.bound.get(name)
        if ask == 0 and known is None:
            for number in range(1, len(asks)):
                is_it = self.setting.ask_contents[number - 1] == content
                if asks[number][0] in ("wanted", "loading") and is_it:
                    ask = number
                    break
        if "conflict" in self.setting.without:
            rank.bound[name] = known = ask or known or 0
        elif known is None or (known == 0 and ask):
            if ask and asks[ask][0] not in OPEN_ASKS:
                if known == 0:
                    self.lapse(name)
                return False
            rank.bound[name] = known = ask
        if known == STOPPED or (ask and ask != known):
            return False
        return known == 0 or asks[known][0] in OPEN_ASKS

    def _free_region(self) -> int | None:
        used = {row.region for row in self.rank.rows.values()}
        return next((g for g in range(self.setting.num_regions) if g not in used), None)

    def notice(self, epoch: int) -> None:
        """Learn that P was restarted: what it alone could complete is over, and memory is given
        back when the end of the old process is proven."""
        rank = self.rank
        rank.sender_epoch = epoch
        bound = set(rank.bound.values())
        for name, row in list(rank.rows.items()):
            row.has_died = True
            if row.state == "landed" and rank.bound[name[0]] <= 0:
                self.on_row(name, "stop")
            self.on_row(name, "writer died")
        for number in range(1, len(rank.asks)):
            if rank.asks[number][0] == "here":
                continue
            if rank.asks[number][0] in OPEN_ASKS:
                self.on_ask(number, "peer is over" if number in bound else "unanswered")
        with_rows = {name for name, _ in rank.rows}
        for shipment in rank.bound.keys() - with_rows:
            del rank.bound[shipment]
