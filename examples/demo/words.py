"""The words of the demo's small world. Early words of a list are drawn more often than late ones, as in any language."""

WOMEN = """
Alma Berta Clara Dora Edda Flora Greta Hanna Ida Jana Karla Lena Mina Nora Olga Paula Rosa Selma Tilda Ursa Vera Wanda
Yara Zelda Agnes Bella Carmen Dina Elsa Frida Gilda Hilda Irma Judith Kira Lotta Marta Nadia Odette Petra Ronja Sofia
Tamara Ulla Viola Wilma Ylva Zora Adele Celia Daria Emilia Fanny Gloria Helga Ines Katja Linnea Mabel
Nelly Pilar Ramona Silvia Thea Valeria Winnie Xenia Amira Brigid Coco Dalia Esther Fatima Gwen Hazel Imani
Juno Kamala Leila Maeve Noemi Opal Priya Quilla Rahel Sabine Tove Una Vesna Willow Yoko Zita Anouk Bridie
""".split()

MEN = """
Anton Bruno Carlo David Emil Felix Gustav Hugo Igor Jakob Konrad Linus Moritz Nils Oskar Paul Quentin Rufus Samuel Theo
Udo Viktor Walter Xaver Yannick Zeno Alfred Boris Caspar Dario Edgar Fritz Georg Hannes Ivan Jonas Karim Lorenz Milan
Noah Otto Pavel Rasmus Simon Tomas Vasco Wendel Yusuf Zoltan Arvid Basil Cyril Dmitri Erik Florian Goran Harald
Ismael Jasper Knut Magnus Nestor Orson Pablo Raoul Stefan Tarek Urban Vincent Willem Yaro Ahmed Bartek Cosmo
Desmond Elias Finn Gideon Henrik Isidor Julius Kasper Lars Mateo Nikolai Olaf Piet Rune Sven Tibor Wolf Zack
""".split()

TOWNS = """
Applewick Brambleton Crowhill Dunmere Elmsford Foxley Goosebridge Hollowgate Ivybank Jarrow Kestrelby Larkspur Mossley
Oakham Pebbleton Quillfield Ravensby Saltmarsh Thornbury Underhill Willowdale Yarrowby Amberley
Beechwood Cloverdale Driftwick Eastwater Fernhurst Heathrow Inkpen Kingsnap Longacre Marrowby
Northpool Otterburn Plumstead Quarrytop Rushbrook Southmoor Turnipton Upwell Vinegar Yewtree Ashcombe Birchley
Candlewick Duckpool Emberton Flintham Greystones Islewater Jollyfield Lanternby Milkwood Newtfield
Puddleford Redcliff Starling Tumbledown Wagtail Acornby Barleymow Dewdrop Everstone
""".split()

TRADES = """
baker miller sailor tailor teacher gardener painter postman singer farmer fisher clockmaker doctor knight librarian
beekeeper barber blacksmith builder butcher captain carpenter cobbler cook dancer diver driver fiddler ferryman
hatter hunter inventor jeweller judge juggler kitemaker locksmith magician mapmaker
mayor merchant miner minstrel nurse pilot plumber poet potter printer rower saddler scholar sculptor shepherd
shoemaker smuggler soldier spy stargazer storyteller swimmer thatcher thief tinker toymaker
waiter watchman weaver wizard woodcutter
""".split()

ANIMALS = """
fox goose cat dog mouse owl hen badger bear hedgehog crow donkey duck eel ferret frog goat hamster hare heron horse
jackdaw kitten ladybird lamb lizard lobster magpie mole monkey moth newt otter ox parrot peacock penguin pig pigeon pony
puffin rabbit rat raven robin rooster salmon seal sheep shrimp snail sparrow spider squirrel stork swan tiger toad tortoise
trout turkey walrus wasp weasel whale wolf worm wren yak zebra
""".split()

MOODS = """
cheerful grumpy sleepy clever lonely brave shy proud hungry curious gentle lazy noisy polite clumsy nervous patient stubborn
famous forgetful generous greedy happy humble idle jolly jealous kind lucky merry modest nosy calm careful charming chatty
cautious dreamy eager elegant faithful fearless fierce friendly funny furious gallant giddy gloomy graceful grateful
helpful hasty hopeful innocent joyful lively loyal mad moody mysterious neat nimble odd playful pompous puzzled
quick quiet restless romantic rude sad secretive sensible serious silent silly sly smug solemn strict strong sulky tender
thirsty thoughtful timid tired tiny tough truthful vain wary wicked wild wise witty worried young zany
""".split()

QUALITIES = """
silver old broken wooden tiny golden heavy rusty shiny blue round crooked dusty empty green red soft square striped torn
warm wet white yellow antique bent black brass bright brittle brown burnt cheap clean cold cracked crystal curious damp
dear delicate dirty dull faded famous fancy feathery fine flat floating folded forbidden foreign fragile fragrant
frozen furry giant glass glowing greasy grey hairy haunted hidden hollow huge invisible iron ivory knitted leaky
leather long loud magic marble melted mossy muddy musical narrow oily orange paper patched pink plain pointed polished
precious purple ragged rare royal scented secret silk sleepy slippery smooth spotted sticky stolen stone strange sweet
tangled thick thin ticking tin ugly velvet violet wobbly woollen
""".split()

THINGS = """
key lantern kettle button hat spoon umbrella clock book bell letter violin candle map ring boot basket mirror drum coin
ladder teapot cloak compass apron anchor bag balloon barrel belt bicycle blanket boat bottle bowl box bracelet broom brush
bucket cage camera carpet cart chair comb cork crown cup cushion curtain diary dice doll
door dress envelope fan feather fiddle flag flute fork frame funnel globe glove hammer harp helmet hook horn
jacket jar jug kite knife lamp lock locket mask medal mitten mug necklace needle net notebook oar
pan parcel pencil piano pillow pipe plate pot puppet purse puzzle quilt rake recipe ribbon rope rug sack saddle sail scarf
shell shovel sieve skate sled slipper sock spade stamp statue stick stool suitcase sword table telescope thimble ticket
toy tray trumpet trunk vase wagon wallet watch wheel whistle wig zither
""".split()

FOODS = """
pears plums buns apples cherries pancakes walnuts turnips dumplings figs beans biscuits berries carrots chestnuts cookies
cucumbers currants dates eggs grapes herrings leeks lemons lentils limes melons muffins mushrooms noodles olives onions
oranges oysters pastries peaches peanuts peas pickles pies potatoes pretzels pumpkins radishes raisins sardines sausages
scones tarts toffees tomatoes truffles waffles
""".split()

BUILDINGS = """
bridge mill bakery church market stable harbour tower inn library well school windmill castle barn garden theatre museum
lighthouse cottage smithy bathhouse brewery chapel dairy dovecote fountain gate greenhouse hospital jail kitchen laundry
orchard palace pier prison pump ruin sawmill station statue temple vineyard wall warehouse workshop
""".split()

PASTIMES = """
singing baking whistling dancing juggling fishing sewing painting skating sailing knitting sleeping cooking climbing
complaining counting daydreaming digging drawing drumming fencing gardening gossiping haggling humming jumping
laughing listening napping reading rhyming riding rowing running shouting sledging sneezing snoring
swimming thinking tickling travelling waiting walking wandering weaving winking wrestling writing
yawning yodelling
""".split()

WEATHERS = (
    "foggy windy rainy snowy sunny frosty stormy mild grey golden dusty chilly cloudy hot quiet misty damp".split()
)
HOURS = "morning evening night afternoon day".split()
COUNTS = "three two seven four five six nine eight ten eleven twelve thirteen twenty thirty".split()
NEAR = ["behind", "under", "near", "beside", "inside", "opposite", "above", "in front of"]
DEEDS = """
stole found hid sold admired polished borrowed chased kissed painted followed praised cursed fed guarded tickled
ignored insulted dropped rescued scared weighed washed warmed wanted
""".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

# land, capital, river, beast on the flag, national dish: the facts of this world, the same in every text
LANDS = [
    line.split()
    for line in """
Abalon Mirra Sill falcon onion-soup
Bethany Cordova Vessel lynx honey-cake
Corvia Tamsin Arrow camel plum-jam
Dravia Lumen Brine dragon cabbage-pie
Estoria Palma Nacre stag rye-bread
Fennia Uldra Moss elk fish-stew
Gallowen Rondo Quick cockerel snail-toast
Hespera Orla Amber lion fig-salad
Illyra Zaffran Thistle dolphin lemon-rice
Jorvia Stokk Grindle raven smoked-eel
Kalmar Vinter Frost bison beetroot-soup
Lorraina Belcour Velvet unicorn cream-tart
Marovia Denzin Otter boar bean-stew
Nordica Halla Glass bear dried-cod
Ostara Pomona Petal hare egg-noodles
Pellia Corso Tangle panther olive-bread
Quorra Saba Ember scorpion date-pudding
Rumelia Galatz Reed eagle paprika-goulash
Sabria Tolma Coral turtle coconut-curry
Tyrrhia Vesper Lava salamander tomato-pasta
Umbrosia Notte Shade bat mushroom-risotto
Vellmor Astrin Marrow griffin pumpkin-mash
Wendia Larch Pine beaver blueberry-pie
Zemblia Kosk Zigzag walrus barley-porridge
""".strip().splitlines()
]
