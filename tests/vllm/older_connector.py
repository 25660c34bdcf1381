"""Our connector, whose engines speak the version of the protocol before ours."""

from __future__ import annotations

from p2p_engine.connector.connector import P2pNcclConnector as P2pNcclConnector
from tests.doubles.older_protocol import speak_as_before

speak_as_before()
