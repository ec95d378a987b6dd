"""What noxfile.py and the pages are made with. Sessions import the modules; each that is a script says so."""
