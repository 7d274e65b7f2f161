"""How call frames get from one session to another: queue and table are pure, endpoint.py does the I/O."""
