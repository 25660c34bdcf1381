"""The socket fuzzer: `make fuzz`; see campaign.py."""
