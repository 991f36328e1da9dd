"""What a sweep file says, and what follows from it: trials, packs, identities, cost. Without torch."""
