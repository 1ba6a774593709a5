"""SFT and preference export with acceptance filters, on the run directory alone. Empty as yet: nothing is exported from here."""
