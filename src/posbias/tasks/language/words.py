"""Words that generated tasks are made of: common English ones, most of them a single token of most tokenizers."""

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
LABELS = ("red", "blue", "green", "black", "white", "gold", "silver", "brown")
"""Labels that belong to no category; as many as there are categories."""

COMMON = (
    *("river", "stone", "paper", "window", "garden", "letter", "market", "bridge", "forest", "kitchen"),
    *("doctor", "winter", "summer", "island", "mountain", "village", "station", "machine", "engine", "bottle"),
    *("mirror", "candle", "basket", "pocket", "ticket", "hammer", "silver", "copper", "cotton", "leather"),
    *("coffee", "sugar", "butter", "bread", "cheese", "pepper", "water", "fire", "snow", "rain"),
    *("storm", "cloud", "moon", "star", "sun", "earth", "ocean", "beach", "valley", "desert"),
    *("school", "church", "hotel", "office", "factory", "library", "museum", "theater", "hospital", "prison"),
    *("king", "queen", "soldier", "teacher", "student", "farmer", "writer", "artist", "pilot", "lawyer"),
    *("music", "dance", "story", "poem", "picture", "camera", "phone", "clock", "watch", "radio"),
    *("apple", "orange", "lemon", "tree", "flower", "grass", "leaf", "root", "seed", "corn"),
    *("dog", "horse", "bird", "fish", "mouse", "tiger", "rabbit", "snake", "wolf", "bear"),
    *("red", "blue", "green", "black", "white", "brown", "yellow", "pink", "purple", "gray"),
    *("house", "door", "wall", "floor", "roof", "chair", "table", "bed", "lamp", "box"),
)
"""Words to copy, all different."""

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

NAMES = (
    *PEOPLE,
    *("Adel", "Bruna", "Corin", "Dalia", "Edric", "Fenna", "Galen", "Hedda", "Ivor", "Jorun", "Kalle", "Lioba"),
    *("Anton", "Beata", "Cyril", "Elena", "Frida", "Greta", "Henrik", "Irena", "Jonas", "Karin", "Lukas", "Mirjam"),
    *("Nils", "Olga", "Pavel", "Rosa"),
)
"""More first names, all different."""
