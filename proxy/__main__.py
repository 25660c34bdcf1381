"""`python -m proxy`."""

from proxy.main import main

raise SystemExit(main())
