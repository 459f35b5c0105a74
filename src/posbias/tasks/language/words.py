"""Words that generated tasks are made of: common English ones, and names."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animal": ("dog", "horse", "rabbit", "tiger", "wolf", "bear", "lion", "mouse", "goat", "duck"),
    "fruit": ("apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach", "pear", "plum"),
    "tool": ("hammer", "saw", "drill", "wrench", "shovel", "axe", "pliers", "chisel", "rake", "screwdriver"),
    "body": ("hand", "foot", "nose", "elbow", "knee", "shoulder", "finger", "chin", "ankle", "wrist"),
    "furniture": ("chair", "table", "sofa", "desk", "shelf", "bed", "bench", "stool", "cabinet", "wardrobe"),
    "vehicle": ("car", "truck", "bus", "train", "boat", "bicycle", "plane", "tractor", "ship", "van"),
    "clothing": ("shirt", "coat", "hat", "glove", "sock", "dress", "scarf", "belt", "jacket", "shoe"),
    "instrument": ("piano", "guitar", "violin", "drum", "flute", "trumpet", "harp", "cello", "organ", "banjo"),
}
"""Members of categories that no word shares with another."""
CITIES = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Vienna", "Athens", "Nairobi", "Quito", "Havana"),
    *("Madrid", "Prague", "Warsaw", "Boston", "Denver", "Sydney", "Manila", "Kyoto", "Hanoi", "Dakar"),
    *("Geneva", "Naples", "Bergen", "Porto", "Seville", "Austin", "Toronto", "Bogota", "Accra", "Tunis"),
    *("Riga", "Turin", "Lyon", "Bremen", "Krakow", "Zagreb", "Sofia", "Malaga", "Perth", "Osaka"),
)
"""Names of places, all different."""

LANDMARKS = {
    "Paris": "the Eiffel Tower",
    "London": "Big Ben",
    "Rome": "the Colosseum",
    "Athens": "the Acropolis",
    "Berlin": "the Brandenburg Gate",
    "Moscow": "the Kremlin",
    "Sydney": "the famous sail-shaped Opera House",
    "Dresden": "the Semperoper",
    "Barcelona": "the Sagrada Familia",
    "Istanbul": "the Hagia Sophia",
    "Agra": "the Taj Mahal",
    "Amsterdam": "the Rijksmuseum",
    "Madrid": "the Prado Museum",
    "Florence": "the Uffizi Gallery",
    "Granada": "the Alhambra",
    "Pisa": "the Leaning Tower",
    "Cairo": "the Khan el-Khalili bazaar",
    "Beijing": "the Forbidden City",
    "Copenhagen": "the Tivoli Gardens",
    "Vienna": "the Belvedere Palace",
}
"""Landmarks by their towns, which share no word with them."""
PEOPLE = (
    *("Yuki", "Stuart", "Katie", "Veronica", "Gary", "Megan", "Calvin", "Mandy", "Diana", "Caleb"),
    *("Nadia", "Omar", "Ingrid", "Hugo", "Priya", "Felix", "Leila", "Marek", "Tessa", "Viktor"),
)
"""First names, all different."""
