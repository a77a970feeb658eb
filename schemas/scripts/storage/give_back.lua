-- Take something back that is not stored any more, or never was.
-- ARGV: tenant, its name
-- Calls storage.lua (joined by schemas/redis/script.py).

give_back(ARGV[1], ARGV[2])
return {'ok'}
