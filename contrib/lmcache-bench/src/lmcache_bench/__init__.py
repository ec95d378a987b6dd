"""The benches of lmcache-core. Each module measures one thing beside a floor or a peer taken in the same run."""
