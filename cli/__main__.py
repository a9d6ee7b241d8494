"""`python -m specdec_cli`."""

from specdec_cli.main import main

main()
