package vocab

// wordList are the most common English words and the usual words of prompts
// and code, in no order that matters. Changing it changes every token id.
const wordList = `
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will no more if out so up said what its about than
into them can only other time new some could these two may first then do any like my now over such our man me even
most made after also did many off before must well back through years much where your way down should because long
each just state those people too mister how little good world make very year still see work life being against
between same under last never day own another while know place since take used here both without again around
however system file data code test function value class return import name list string number type error user
model token prompt answer question text word line path module python write read open close call start stop end
begin first second third last next previous order group part point case fact hand head side water house room door
night day week month hour minute light dark white black red green blue small large great high low early late old
young right left true false yes none null always often sometimes usually maybe perhaps really quite almost enough
such thing things something anything nothing everything someone anyone everyone way ways kind kinds form forms
think thought feel felt seem seems look looks looked turn turned move moved find found give gave given tell told ask
asked show shows shown help helps need needs want wants try tries tried keep kept let lets mean means meant set sets
put run runs ran play plays hold held bring brought happen happens happened provide provides include includes
including continue learn learned change changes changed lead leads understand understood watch follow follows
create creates created speak spoke read allow allows add adds added spend grow grew open walk win offer remember
consider appear buy wait serve die send sent expect build built stay fall cut reach kill remain suggest raise pass
sell require report decide pull explain explains careful assistant system request response server client network
memory cache block prefix key keys value values hash table tree node leaf root index count total sum average min max
time times speed rate cost price market company business money bank country city town street school student teacher
family friend mother father child children woman women men boy girl person human body heart eye eyes face mind
story book page paper letter letters language english word words sentence paragraph chapter history science
machine computer program software hardware process thread lock queue stack heap array map object method field
variable constant loop condition expression statement operator argument parameter result output input stream buffer
byte bytes bit bits integer float double character boolean date address message event signal log debug info warning
simple complex easy hard fast slow short tall wide narrow deep empty full clean clear bright heavy strong weak
rich poor cheap free busy quick quiet loud warm cold hot cool dry wet soft safe sure ready able likely possible
important different similar common rare special general public private local remote single multiple certain several
north south east west mountain river sea ocean lake island forest tree trees flower grass field farm animal dog cat
bird fish horse food bread meat fruit apple milk tea coffee sugar salt oil fire air earth sun moon star stars sky
cloud rain snow wind storm summer winter spring autumn morning evening today tomorrow yesterday ago soon later
above below behind beside beyond near far toward across along among within upon during until unless although though
whether either neither nor yet thus hence therefore because example instance reason purpose goal plan idea problem
solution question issue matter subject topic area level degree amount size length width height weight distance
one two three four five six seven eight nine ten hundred thousand million billion half quarter dozen pair double
once twice again further rather instead together apart alone ahead away forward inside outside everywhere somewhere
government president law court police army war peace power control force party leader member nation world
health doctor hospital medicine disease care treatment patient drug study research experiment theory evidence
music song art picture film movie game sport team player ball race prize dance stage voice sound noise color shape
car bus train plane ship boat road bridge station airport travel trip journey visit map hotel restaurant kitchen
table chair bed window wall floor roof garden box bag bottle cup glass plate knife key phone camera clock
`

// partList are parts of longer words.
const partList = `
ing ion tion ation ment ness able ible ful less ous ive ize ise ist ism ity ance ence ant ent ary ery ory
ers est ied ies ted ted ting ting ring ling ning ding king sing ping able ally ical ably edly fully ship
pre pro con com dis mis non sub sup per par over under inter trans super anti auto multi micro
str thr sch scr spl spr shr the and ter der ver ser ber ler mer ner per cer ger ker tor lor
ate ite ute ile ine ame ome ime ake oke ike age ige ade ide ode ude ace ice uce ire ure ore are ere
all ell ill oll ull ass ess iss oss uss ack eck ick ock uck ash esh ish osh ush ast est ist ost ust
out ount ound ight ough ould tion sion cial tial ious eous uous
`
